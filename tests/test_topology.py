"""Devices that are not there: names of slices, and the meshes that work on them."""

import sys

import pytest

from deltares_jax import config as config_lib
from deltares_jax.parallel import chips, fit, topology
from deltares_jax.parallel import mesh as mesh_lib
from deltares_jax.training import planning

CPU8 = topology.parse("cpu:8")


@pytest.fixture
def planned(tiny):
    """The tiny config, for eight devices."""
    return config_lib.resolve(tiny)


def ignore(text: str) -> None:
    """Progress that nobody reads."""


# Names.


@pytest.mark.parametrize(
    ("name", "expected", "num_chips", "links"),
    [
        ("v5p:4x4x4", "v5p:4x4x4", 64, 6),
        ("V5P-128", "v5p:4x4x4", 64, 6),  # counts cores
        ("v4-16", "v4:2x2x2", 8, 3),
        ("v4:2x2x1", "v4:2x2x1", 4, 2),
        ("v5e-16", "v5e:4x4", 16, 2),
        ("v5litepod-256", "v5e:16x16", 256, 4),
        ("v5e:8x16", "v5e:8x16", 128, 3),
        ("v6e-64", "v6e:8x8", 64, 2),
        ("v6e-1", "v6e:1x1", 1, 0),
        ("v7x:4x4x4", "tpu7x:4x4x4", 64, 6),
        ("tpu7x-8", "tpu7x:2x2x1", 4, 2),
        ("cpu:8", "cpu:8", 8, 0),
    ],
)
def test_names(name, expected, num_chips, links):
    parsed = topology.parse(name)
    assert (parsed.name, parsed.num_chips) == (expected, num_chips)
    if parsed.chip:
        assert parsed.links == links


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e-17", "--topology=v5e-17: .*nearest: v5e:4x4, which is v5e-16$"),
        ("v5p-64x", "did you mean v5p-64"),
        ("v5p:3x4x4", "v5p:3x4x4: .*nearest: v5p:2x4x4"),
        ("v5e:4x4x4", "v5e:4x4x4: .*nearest: v5e:8x8"),
        ("v5e:16x32", "v5e:16x32: .*nearest: v5e:16x16"),
        ("foo", "--topology=foo: known are v4, v5e, v5p, v6e, tpu7x"),
        ("v5e", "known are"),
        ("cpu-8", r"did you mean cpu:8\?"),
        ("v7:2x2x1", r"did you mean tpu7x:2x2x1\?"),
        ("cpu:1025", "--topology=cpu:1025: at most 1024 "),
        ("cpu:0", "known are"),
        ("cpu:2x2", "known are"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name, message):
    with pytest.raises(ValueError, match=message):
        topology.parse(name)


def test_shapes_beside_the_list_are_accepted_with_a_note():
    (note,) = topology.parse("v5p:4x4x5").notes
    assert note.startswith("v5p:4x4x5 is not one of the slices listed for v5p (2x2x1, 2x2x2, ")
    assert topology.parse("v5p:4x4x4").notes == topology.parse("cpu:6").notes == []


def test_without_libtpu_the_command_to_install_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(ValueError, match=r"v5e:4x4 needs libtpu: pip install -e '\.\[tpu\]'"):
        topology.devices(topology.parse("v5e-16"))


# Meshes.


def test_a_mesh_of_the_wrong_size_is_refused(planned):
    config = planning.with_values(planned, {"mesh.fsdp": 3})
    with pytest.raises(ValueError, match=r"mesh\.fsdp=3.*8 devices of the topology"):
        planning.make(config, CPU8, ignore)


@pytest.mark.parametrize(
    ("sizes", "works"),
    [
        ({"data": 3, "fsdp": -1}, "is 3 and must divide 8; nearest: 2 or 4$"),
        ({"data": 16, "fsdp": -1}, "is 16 and must divide 8; nearest: 8$"),
        ({"data": 2, "fsdp": 3}, "is 6 and must be 8; mesh.fsdp=4 would do$"),
        ({"data": 3, "fsdp": 3}, "is 9 and must be 8$"),
    ],
)
def test_sizes_that_make_up_the_devices_are_named(sizes, works):
    mesh = {"replica": 1, "data": 1, "tensor": 1, **sizes}
    with pytest.raises(ValueError, match=f"8 devices that were found: the product .*{works}"):
        mesh_lib.mesh_shape(mesh, 8)


def test_another_platform_is_refused_as_by_train(planned):
    config = planning.with_values(planned, {"train.platform": "tpu"})
    with pytest.raises(ValueError, match=r"train\.platform=tpu does not go with --topology=cpu:8"):
        planning.make(config, CPU8, ignore)


def test_large_replicated_arrays_are_refused_as_by_train(planned, monkeypatch):
    monkeypatch.setattr("deltares_jax.parallel.report._LARGE_BYTES", 100)
    with pytest.raises(ValueError, match=r"mesh\.fsdp=8 .*would leave .*replicated: "):
        planning.make(planned, CPU8, ignore)


def test_meshes_that_work_are_named(planned):
    config = planning.with_values(planned, {"model.vocab_size": 264, "train.batch_size": 4})
    assert fit.working_meshes(config, 8) == [{"tensor": 2}]  # two KV heads
    for mesh in ({}, {"mesh.fsdp": 8}):
        asked = planning.with_values(config, mesh)
        with pytest.raises(ValueError, match=r"train\.batch_size=4 .*4 sequences on 8 ") as error:
            planning.make(asked, CPU8, ignore)
        assert "--config.mesh.tensor=2 " in str(error.value)
    overrides = fit.working_meshes(asked, 8)[0]
    assert mesh_lib.mesh_shape({**asked.mesh, **overrides}, 8)["fsdp"] == 4


def test_a_mesh_without_tensor_is_named_too(planned):
    values = {"mesh.tensor": 2, "data.seq_len": 127}
    config = planning.with_values(planned, values)
    with pytest.raises(ValueError, match=r"data\.seq_len=127 .*: --config\.mesh\.tensor=1 works$"):
        planning.make(config, CPU8, ignore)
    config = planning.with_values(planned, values | {"train.batch_size": 3})
    with pytest.raises(ValueError, match=r"train\.batch_size=3 .*; nearest: 4$"):
        planning.make(config, CPU8, ignore)


# For TPUs, where libtpu is installed.


@pytest.mark.parametrize("name", ["v4-8", "v5e-1", "v5e-4", "v5p-8", "v6e-8", "tpu7x-8"])
def test_devices_are_those_of_the_chip_table(name):
    pytest.importorskip("libtpu")
    parsed = topology.parse(name)
    devices = topology.devices(parsed)
    assert len(devices) == parsed.num_chips * parsed.devices_per_chip
    assert chips.by_device_kind(devices[0].device_kind) is parsed.chip
