"""A Hugging Face Hub on this machine: the few endpoints that creating, uploading to and loading from a repository need.

Files are kept in memory; uploads are "regular" ones (their bytes in the commit). It knows nothing of this project.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

# A repository is "user/name", or a bare name like "gpt2".
_REPO = re.compile(
    r"^/api/models/((?:[^/]+/)??[^/]+)(?:/(preupload|commit|revision|tree|branch)(?:/([^/]+))?(?:/(.*))?)?$"
)
_FILE = re.compile(r"^/((?:[^/]+/)?[^/]+)/resolve/([^/]+)/(.+)$")


class HubServer:
    """Runs until `close`. `files[repo]` maps paths to bytes; uploads to those in `failing` end with status 403."""

    def __init__(self, user: str = "tester"):
        self.user, self.files, self.commits, self.unknown = user, {}, {}, []
        self.failing: set[str] = set()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def sha(self, repo: str) -> str:
        return hashlib.sha1(repr(sorted(self.files[repo].items())).encode()).hexdigest()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _send(self, status: int, body=b"", headers: dict | None = None) -> None:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str, **headers) -> None:
        self._send(status, {"error": code}, {"X-Error-Code": code, **headers})

    def _respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, query = unquote(urlsplit(self.path).path), parse_qs(urlsplit(self.path).query)
        if path == "/api/whoami-v2":
            access = {"accessToken": {"role": "write"}}
            self._send(200, {"type": "user", "name": self.hub.user, "orgs": [], "auth": access})
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif found := _REPO.match(path):
            self._repository(*found.groups(), query, body)
        elif found := _FILE.match(path):
            self._file(found[1], found[3])
        else:
            self.hub.unknown.append((self.command, self.path))
            self._error(404, "NotFound")

    do_GET = do_HEAD = do_POST = do_PUT = _respond

    def _create(self, asked: dict) -> None:
        repo = f"{asked.get('organization') or self.hub.user}/{asked['name']}"
        exists = repo in self.hub.files
        self.hub.files.setdefault(repo, {".gitattributes": b""})
        self.hub.commits.setdefault(repo, [])
        self._send(409 if exists else 200, {"url": f"{self.hub.url}/{repo}", "id": "0", "name": repo})

    def _repository(self, repo: str, action: str, revision: str, rest: str, query: dict, body: bytes) -> None:
        files = self.hub.files.get(repo)
        if files is None:
            self._error(404, "RepoNotFound")
        elif action == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            self._send(200, {"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]})
        elif action == "commit" and repo in self.hub.failing:
            self._error(403, "Forbidden")  # not 5xx, which is tried again for minutes
        elif action == "commit":
            self._commit(repo, [json.loads(line) for line in body.splitlines()])
        elif action == "tree":
            inside = {path: data for path, data in files.items() if not rest or path.startswith(rest + "/")}
            entries = [
                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for path, data in inside.items()
            ]
            self._send(200, entries)
        elif action == "branch":
            self._send(200, {})
        else:
            siblings = [{"rfilename": path} for path in files]
            self._send(200, {"_id": "0", "id": repo, "sha": self.hub.sha(repo), "tags": [], "siblings": siblings})

    def _commit(self, repo: str, lines: list[dict]) -> None:
        for line in lines:
            if line["key"] == "file":
                self.hub.files[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "header":
                self.hub.commits[repo].append(line["value"]["summary"])
        sha = self.hub.sha(repo)
        self._send(200, {"commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "commitOid": sha, "success": True})

    def _file(self, repo: str, path: str) -> None:
        if repo not in self.hub.files:
            self._error(404, "RepoNotFound")
        elif path not in self.hub.files[repo]:
            self._error(404, "EntryNotFound", **{"X-Repo-Commit": self.hub.sha(repo)})
        else:
            data = self.hub.files[repo][path]
            tag = f'"{hashlib.sha1(data).hexdigest()}"'
            self._send(200, data, {"X-Repo-Commit": self.hub.sha(repo), "ETag": tag, "Accept-Ranges": "bytes"})
