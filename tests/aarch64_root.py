"""Make a folder with an aarch64 Python that runs artifacts: `python tests/aarch64_root.py DIR`.

For `pytest -m slow tests/test_aarch64.py --aarch64-root DIR`, with qemu-user, on another kind of
machine. Python and its libraries are Debian's, through this machine's apt (a Debian is needed; no
rights of root are, and nothing is installed); the wheels of what pyproject.toml depends on come
through pip. Neither runs anything of the packages.
"""

import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGES = ("python3", "libstdc++6")
# pip takes a wheel only for a tag that it is told: those of the oldest glibc up to the README's.
PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in range(17, 29)]
PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def fetch_debian(root: Path) -> None:
    """Unpack PACKAGES and all that they need into `root`, from this machine's Debian."""
    with TemporaryDirectory() as folder:
        state = Path(folder)
        # No installed package is known there, so everything is needed.
        (state / "status").touch()
        settings = {
            "APT::Architecture": "arm64",
            "APT::Architectures": "arm64",
            "APT::Sandbox::User": "",
            "Dir::Cache": state,
            "Dir::Log": state,
            "Dir::State": state,
            "Dir::State::status": state / "status",
        }
        apt = ["apt-get", "-q", "-y", *(f"-o{key}={value}" for key, value in settings.items())]
        subprocess.run([*apt, "update"], check=True)
        get = ["--no-install-recommends", "--download-only", "install", *PACKAGES]
        subprocess.run([*apt, *get], check=True)
        for package in sorted((state / "archives").glob("*.deb")):
            subprocess.run(["dpkg", "-x", package, root], check=True)
    if not (root / "lib").exists():
        # Newer packages leave this link to the base system.
        (root / "lib").symlink_to("usr/lib")


def fetch_wheels(root: Path) -> None:
    """Unpack the wheels of the package's dependencies, and theirs, into `root`/site."""
    (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", PYPROJECT.read_text(), re.M | re.S)
    python = (root / "usr" / "bin" / "python3").resolve().name.removeprefix("python")
    pip = [sys.executable, "-m", "pip", "install", "--no-compile", "--only-binary=:all:"]
    place = ["--target", root / "site", "--python-version", python]
    place += [f"--platform={platform}" for platform in PLATFORMS]
    subprocess.run([*pip, *place, *re.findall(r'^ +"(.+)",$', listed, re.M)], check=True)


def main(directory: str) -> None:
    root = Path(directory)
    root.mkdir(parents=True)
    fetch_debian(root)
    fetch_wheels(root)


if __name__ == "__main__":
    main(*sys.argv[1:])
