"""What our images are made of. Pure: reads the recipes shipped with the program, builds nothing."""

import hashlib
import shlex
import tomllib
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

import msgspec

SUITE: Final = "bookworm"
IMAGES: Final = ("forwarder", "helper", "sandbox")
# The uid of the image's user; see control.plan.container.SandboxSettings.uid.
USER_ID: Final = 60610
LABEL_IMAGE: Final = "opificia.image"

_MERGED_USR: Final = "/usr/share/mmdebstrap/hooks/merged-usr"
# Documentation is for people with a shell on the host. Copyright files stay: the licences ask for it.
_NEVER_UNPACKED: Final = (
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/man/*",
)


class Download(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A gzipped tarball unpacked into the image without its top folder, taken only with exactly this SHA-512."""

    url: str
    sha512: str
    into: str

    @property
    def name(self) -> str:
        """The file's name in the cache."""
        return self.url.rpartition("/")[2]


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One image: Debian packages, files put into it, and how the engine starts it.

    `variant` is mmdebstrap's. `files` maps a file beside the recipe to its path in the image, `links` a path in the
    image to what the link says. `config` holds fields of Docker's image configuration.
    """

    name: str
    variant: str
    packages: tuple[str, ...]
    config: dict[str, str | list[str]]
    exclude: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    downloads: tuple[Download, ...] = ()
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    user: str = ""

    def source(self, file: str) -> Traversable:
        """Return a file that stands beside the recipe."""
        return resources.files("control.images") / self.name / file

    def digest(self, mirrors: Sequence[str] = ()) -> str:
        """Return a hash over everything the image is made from, 16 hex digits."""
        contents = [self.source(file).read_bytes() for file in sorted(self.files)]
        hashes = [download.sha512 for download in self.downloads]
        everything = (SUITE, self.options("SCRATCH", "CACHE"), tuple(mirrors), contents, hashes)
        return hashlib.sha256(msgspec.json.encode(everything, order="sorted")).hexdigest()[:16]

    def label(self, mirrors: Sequence[str] = ()) -> str:
        """Return what says, on an image, that it was made from exactly this."""
        return f"{self.name}-{self.digest(mirrors)}"

    def changes(self, mirrors: Sequence[str] = ()) -> list[str]:
        """Return the image's configuration as Dockerfile instructions, as `docker import --change` takes them."""
        instructions = {"Cmd": "CMD", "User": "USER", "WorkingDir": "WORKDIR"}
        lines = [f"LABEL {LABEL_IMAGE}={self.label(mirrors)}"]
        for field, value in self.config.items():
            if field == "Env":
                lines += [f"ENV {entry}" for entry in value]
            elif isinstance(value, str):
                lines.append(f"{instructions[field]} {value}")
            else:
                lines.append(f"{instructions[field]} {msgspec.json.encode(value).decode()}")
        return lines

    def options(self, scratch: str, cache: str) -> list[str]:
        """Return mmdebstrap's options. `scratch` is the folder with the recipe's files, `cache` that with downloads."""
        # What is only unpacked is never configured, so it has no later stage to hook into.
        stage = "extract" if self.variant == "extract" else "customize"
        return [
            f"--variant={self.variant}",
            # Without it the `extract` variant pulls perl in to merge /usr by itself.
            f"--hook-dir={_MERGED_USR}",
            '--aptopt=APT::Install-Recommends "false"',
            f"--include={','.join(self.packages)}",
            *(f"--dpkgopt={option}" for option in _NEVER_UNPACKED),
            *(f"--dpkgopt=path-exclude={pattern}" for pattern in self.exclude),
            *(f"--{stage}-hook={hook}" for hook in self._hooks(scratch, cache)),
        ]

    def _hooks(self, scratch: str, cache: str) -> list[str]:
        lines = [f'mkdir -p "$1"/{directory}' for directory in self.directories]
        for name, inside in self.files.items():
            mode = "0755" if name.endswith(".sh") else "0644"
            lines.append(f'install -D -m {mode} {shlex.quote(f"{scratch}/{name}")} "$1"/{inside}')
        for download in self.downloads:
            lines.append(f'mkdir -p "$1"/{download.into}')
            unpack = f"tar -xzf {shlex.quote(f'{cache}/{download.name}')} --strip-components=1 --no-same-owner"
            lines.append(f'{unpack} -C "$1"/{download.into}')
        lines += [f'ln -s {target} "$1"/{link}' for link, target in self.links.items()]
        if self.user:
            lines += [
                f'chroot "$1" groupadd --gid {USER_ID} {self.user}',
                f'chroot "$1" useradd --uid {USER_ID} --gid {USER_ID} --create-home --shell /bin/bash {self.user}',
                f'chown {USER_ID}:{USER_ID} "$1"/work "$1"/out',
                # Shadow keeps the day of the last change, and backups of what it changed.
                f'chroot "$1" chage --lastday 20089 {self.user}',
                'rm -f "$1"/etc/passwd- "$1"/etc/group- "$1"/etc/shadow- "$1"/etc/gshadow- "$1"/etc/sub?id-',
            ]
        return [
            *lines,
            # The site's proxy and certificate authority were for the build.
            'rm -f "$1"/etc/apt/apt.conf.d/99mmdebstrap "$1"/etc/dpkg/dpkg.cfg.d/99mmdebstrap',
            'rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/* "$1"/var/log/*',
            # Docker puts its own in place.
            'rm -f "$1"/etc/hostname "$1"/etc/resolv.conf',
        ]


def recipe(name: str) -> Recipe:
    """Return the recipe of one of IMAGES. Raises KeyError for another name."""
    if name not in IMAGES:
        raise KeyError(name)
    text = (resources.files("control.images") / name / "recipe.toml").read_text(encoding="utf-8")
    return msgspec.convert({"name": name, **tomllib.loads(text)}, Recipe)
