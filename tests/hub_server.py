"""A model hub on this machine: files in a dictionary, laid out like the Hugging Face hub."""

import collections
import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse


class Hub(http.server.ThreadingHTTPServer):
    """Serves `files`, {(kind and name of the repository, path): content}, any revision.

    `faults` holds for a file's path what its next answers do: an HTTP status, or `cut` to close the
    connection in the middle. `requests` lists what was asked for.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[tuple[str, str], bytes] = {}
        self.faults: dict[str, list] = collections.defaultdict(list)
        self.requests: list[tuple[str, str]] = []
        self.checksums = True
        self.page = 1000

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def listing(self, repository: str, folder: str) -> list[dict]:
        entries = [{"type": "directory", "path": folder, "size": 0, "oid": "0"}]
        for (owner, path), content in sorted(self.files.items()):
            if owner == repository and path.startswith(f"{folder}/" if folder else ""):
                entry = {"type": "file", "path": path, "size": len(content), "oid": "0"}
                if self.checksums:
                    oid = hashlib.sha256(content).hexdigest()
                    entry["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 134}
                entries.append(entry)
        return entries


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        parts = url.path.strip("/").split("/")
        self.server.requests.append((url.path, self.headers.get("Range", "")))
        faults = self.server.faults[url.path.rpartition("/")[2]]
        fault = faults.pop(0) if faults else None
        if isinstance(fault, int):
            self.send_error(fault)
        elif parts[0] == "api":  # api/datasets/OWNER/NAME/tree/REVISION/PATH, or of models
            repository = "/".join(parts[1:4] if parts[1] == "datasets" else parts[2:4])
            entries = self.server.listing(repository, "/".join(parts[6:]))
            at = int(dict(urllib.parse.parse_qsl(url.query)).get("cursor", 0))
            more = {}
            if at + self.server.page < len(entries):
                rest = f"{self.server.address}{url.path}?cursor={at + self.server.page}"
                more = {"Link": f'<{rest}>; rel="next"'}
            self.answer(json.dumps(entries[at : at + self.server.page]).encode(), more, fault)
        else:  # [datasets/]OWNER/NAME/resolve/REVISION/PATH
            count = 3 if parts[0] == "datasets" else 2
            content = self.server.files.get(("/".join(parts[:count]), "/".join(parts[count + 2 :])))
            if content is None:
                self.send_error(404)
            else:
                self.answer(content, {}, fault)

    def answer(self, content: bytes, headers: dict[str, str], fault):
        start = int(self.headers.get("Range", "bytes=0-")[6:-1])
        self.send_response(206 if start else 200)
        rest = content[start:]
        for key, value in {**headers, "Content-Length": str(len(rest))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(rest[: len(rest) // 2] if fault == "cut" else rest)
        self.close_connection = True


@contextlib.contextmanager
def hub():
    """A running server."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
