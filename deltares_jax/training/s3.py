"""Checkpoints at s3://: Orbax makes specs of TensorStore for gs:// and local files alone.

TensorStore itself reads and writes there, too.
"""

import functools
import os
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint._src.serialization import tensorstore_utils

_SCHEME = "s3://"


@functools.cache  # once is enough
def enable() -> None:
    """Orbax of this process takes addresses at s3://.

    Raises:
      ValueError: this version of Orbax makes its specs elsewhere.
    """
    made = getattr(tensorstore_utils, "build_kvstore_tspec", None)
    if made is None:
        raise ValueError(
            "this version of orbax-checkpoint cannot write to s3://; install 0.12.8, or give a "
            "mounted folder"
        )

    @functools.wraps(made)
    def spec(directory: str, *args: Any, **kwargs: Any) -> Any:
        if not directory.startswith(_SCHEME):
            return made(directory, *args, **kwargs)
        return _at_s3(made(f"gs://{directory.removeprefix(_SCHEME)}", *args, **kwargs))

    tensorstore_utils.build_kvstore_tspec = spec


def _at_s3(spec: Any) -> Any:
    """A spec of TensorStore with the driver of S3 wherever it has that of GCS."""
    if isinstance(spec, list):
        return [_at_s3(part) for part in spec]
    if not isinstance(spec, dict):
        return spec
    spec = {key: _at_s3(value) for key, value in spec.items()}
    if spec.get("driver") in ("gcs", "gcs_grpc"):
        spec = {key: spec[key] for key in ("bucket", "path")} | {"driver": "s3"} | _place()
    return spec


def _place() -> dict[str, Any]:
    """What s3fs takes from the environment, and TensorStore does not."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    place: dict[str, Any] = {}
    if endpoint:
        place["endpoint"] = endpoint
        if region:
            place["aws_region"] = region
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        place["aws_credentials"] = {"type": "environment"}  # else it complains of missing files
    return place


def writer_options(directory: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """How a checkpoint is marked as whole, for a checkpointer and for its items.

    Orbax renames where a path is not at gs://; at s3:// that would copy.
    """
    if not str(directory).startswith(_SCHEME):
        return {}, {}
    by_mark = {"temporary_path_class": ocp.path.atomicity.CommitFileTemporaryPath}
    return by_mark, {"composite_options": ocp.CompositeOptions(**by_mark)}
