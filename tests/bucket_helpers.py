"""Buckets on this machine, at gs:// and s3://, for tests."""

import functools
import logging
import os
import uuid
from typing import Any

import fsspec


@functools.cache  # TensorStore keeps the address that it has seen first
def _gs_server() -> str:
    from gcp_storage_emulator.handlers import objects
    from gcp_storage_emulator.server import create_server

    download = objects.download

    def with_generation(request: Any, response: Any, storage: Any, *args: Any) -> None:
        """As the real one does, and TensorStore needs it."""
        place = request.params["bucket_name"], request.params["object_id"]
        if place[1] in storage.objects.get(place[0], {}):
            response["X-Goog-Generation"] = storage.get_file_obj(*place)["generation"]
        download(request, response, storage, *args)

    objects.download = with_generation
    logging.getLogger("gcp_storage_emulator").setLevel(logging.ERROR)
    logging.getLogger("gcsfs").setLevel(logging.ERROR)
    server = create_server("localhost", 0, in_memory=True)
    server._api.daemon = True
    server.start()
    return f"http://localhost:{server._api._httpd.server_address[1]}"


def gs_bucket() -> str:
    """The address of a new bucket; variables of this process lead there."""
    os.environ["STORAGE_EMULATOR_HOST"] = os.environ["TENSORSTORE_GCS_HTTP_URL"] = _gs_server()
    return _made("gs")


@functools.cache
def _s3_server() -> str:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0)
    server.start()
    return "http://{}:{}".format(*server.get_host_and_port())


def s3_bucket() -> str:
    """The address of a new bucket; variables of this process lead there."""
    os.environ |= {
        "AWS_ENDPOINT_URL": _s3_server(),
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    return _made("s3")


def _made(scheme: str) -> str:
    address = f"{scheme}://bucket-{uuid.uuid4().hex[:8]}"
    fsspec.filesystem(scheme).mkdir(address)
    return address
