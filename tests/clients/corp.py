"""A company's own server: pages, git over smart HTTP, and one package for pip, npm and apt each."""

import asyncio
import hashlib
import io
import json
import os
import ssl
import subprocess
import tarfile
import zipfile
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import Final

from aiohttp import web

from tests.support.app_server import AppServer

REPOSITORY: Final = "project.git"
README: Final = "the company's project\n"
PACKAGE: Final = "opificia-tiny"
VERSION: Final = "1.2.3"
BIG_BYTES: Final = 400_000
_WHEEL: Final = f"opificia_tiny-{VERSION}-py3-none-any.whl"
_TARBALL: Final = f"{PACKAGE}-{VERSION}.tgz"


class CorpServer:
    """Serves the same over TLS on port 443 and in the clear on port 80 of one address."""

    def __init__(self, folder: Path) -> None:
        self._git_root = folder
        self._wheel = _wheel()
        self._tarball = _tarball()
        self._apt_files = _apt_files()
        self._server: AppServer | None = None

    async def start(self, address: str, tls: ssl.SSLContext) -> None:
        """Make the repository and listen."""
        _make_repository(self._git_root / REPOSITORY)
        app = web.Application(client_max_size=8 << 20)
        app.router.add_get("/hello", self._hello)
        app.router.add_get("/big", self._big)
        app.router.add_route("*", "/git/{path:.+}", self._git)
        app.router.add_get(f"/simple/{PACKAGE}/", self._simple_index)
        app.router.add_get(f"/simple/{PACKAGE}/{_WHEEL}", self._simple_file)
        app.router.add_get(f"/npm/{PACKAGE}", self._npm_index)
        app.router.add_get(f"/npm/{_TARBALL}", self._npm_file)
        app.router.add_get("/apt/{path:.+}", self._apt)
        self._server = AppServer(app, auto_decompress=False, access_log=None, shutdown_timeout=0.1)
        for port, context in ((80, None), (443, tls)):
            await self._server.listen((address, port), context)

    async def close(self) -> None:
        """Stop."""
        if self._server is not None:
            await self._server.close()

    def head(self, branch: str) -> str:
        """Return the commit that a branch of the repository is at."""
        return _git(self._git_root / REPOSITORY, "rev-parse", f"refs/heads/{branch}").strip()

    async def _hello(self, request: web.Request) -> web.StreamResponse:
        # What came in besides, so that a test sees that nothing of the gateway's did.
        headers = sorted(name.lower() for name in request.headers)
        return web.json_response({"hello": request.scheme, "headers": headers})

    async def _big(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=bytes(BIG_BYTES))

    async def _git(self, request: web.Request) -> web.StreamResponse:
        """Run git-http-backend(1) by the rules of CGI (RFC 3875)."""
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self._git_root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_CONFIG_NOSYSTEM": "1",
            "HOME": str(self._git_root),
            "PATH_INFO": f"/{request.match_info['path']}",
            "QUERY_STRING": request.query_string,
            "REQUEST_METHOD": request.method,
            "CONTENT_TYPE": request.headers.get("Content-Type", ""),
            "HTTP_CONTENT_ENCODING": request.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": request.headers.get("Git-Protocol", ""),
            "REMOTE_USER": "agent",
        }
        body = await request.read()
        backend = await asyncio.create_subprocess_exec(
            *("git", "http-backend"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment | {"CONTENT_LENGTH": str(len(body))},
        )
        answer, _ = await backend.communicate(body)
        head, _, content = answer.partition(b"\r\n\r\n")
        headers = dict(BytesHeaderParser().parsebytes(head + b"\r\n\r\n"))
        status = int(headers.pop("Status", "200").split()[0])
        return web.Response(body=content, status=status, headers=headers)

    # Python: the simple repository API (PEP 503)

    async def _simple_index(self, _request: web.Request) -> web.StreamResponse:
        digest = hashlib.sha256(self._wheel).hexdigest()
        page = f'<!DOCTYPE html><a href="{_WHEEL}#sha256={digest}">{_WHEEL}</a>'
        return web.Response(text=page, content_type="text/html")

    async def _simple_file(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._wheel)

    # npm: a packument and its tarball

    async def _npm_index(self, request: web.Request) -> web.StreamResponse:
        dist = {
            "tarball": f"{request.scheme}://{request.host}/npm/{_TARBALL}",
            "shasum": hashlib.sha1(self._tarball).hexdigest(),
        }
        versions = {VERSION: {"name": PACKAGE, "version": VERSION, "dist": dist}}
        return web.json_response({"name": PACKAGE, "dist-tags": {"latest": VERSION}, "versions": versions})

    async def _npm_file(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._tarball)

    # Debian: a flat repository

    async def _apt(self, request: web.Request) -> web.StreamResponse:
        # apt asks for `./Packages`.
        content = self._apt_files.get(request.match_info["path"].rpartition("/")[2])
        return web.Response(status=404) if content is None else web.Response(body=content)


def _git(repository: Path, *arguments: str, stdin: str = "") -> str:
    argv = ["git", "-C", str(repository), *arguments]
    environment = {"PATH": os.environ["PATH"], "HOME": str(repository.parent), "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(argv, check=True, env=environment, input=stdin, text=True, stdout=subprocess.PIPE).stdout


def _make_repository(repository: Path) -> None:
    repository.mkdir(parents=True)
    _git(repository, "init", "--quiet", "--bare", "--initial-branch=main")
    _git(repository, "config", "http.receivepack", "true")
    commit = "commit refs/heads/main\ncommitter A <a@corp.example> 1700000000 +0000\ndata 5\nfirst\n"
    _git(
        repository,
        "fast-import",
        "--quiet",
        stdin=f"{commit}M 100644 inline README\ndata {len(README)}\n{README}\n",
    )


def _wheel() -> bytes:
    info = f"opificia_tiny-{VERSION}.dist-info"
    files = {
        "opificia_tiny.py": "ANSWER = 42\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def _tarball() -> bytes:
    buffer = io.BytesIO()
    files = {"package.json": json.dumps({"name": PACKAGE, "version": VERSION}), "index.js": "module.exports = 42;\n"}
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


def _apt_files() -> dict[str, bytes]:
    packages = (
        f"Package: {PACKAGE}\nVersion: {VERSION}\nArchitecture: all\nMaintainer: A <a@corp.example>\n"
        f"Filename: ./none.deb\nSize: 1\nSHA256: {hashlib.sha256(b'x').hexdigest()}\nDescription: tiny\n\n"
    ).encode()
    release = (
        "Origin: corp\nSuite: stable\nCodename: stable\nDate: Tue, 14 Nov 2023 22:13:20 UTC\n"
        f"SHA256:\n {hashlib.sha256(packages).hexdigest()} {len(packages)} Packages\n"
    ).encode()
    return {"Packages": packages, "Release": release}
