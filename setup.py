"""What pyproject.toml cannot say: an editable install that type checkers find, too.

`kernels/` is imported as `radixkv_kernels`, so setuptools installs a finder: code that runs when
Python looks for a module. mypy and pyright run none; they read the folders that `.pth` files
name. So the editable wheel names a folder as well, ``build/editable``, in which `radixkv` is a
link. Not this folder itself: `kernels` is another distribution's name, and libraries that look
for that one must not find our folder.
"""

import base64
import hashlib
import zipfile
from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
FOLDER = ROOT / "build" / "editable"


def link_package() -> bool:
    """Make ``FOLDER``; False where the system has no links, and the finder must do."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    link = FOLDER / "radixkv"
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(ROOT / "radixkv", target_is_directory=True)
    except OSError:
        return False
    return True


def name_folder(wheel: Path) -> None:
    """Put a `.pth` file with ``FOLDER`` into ``wheel``, and into its list of files."""
    with zipfile.ZipFile(wheel) as old:
        files = {info: old.read(info) for info in old.infolist()}
    name, content = "radixkv.pth", f"{FOLDER}\n".encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        new.writestr(name, content)
        for info, data in files.items():
            if info.filename.endswith(".dist-info/RECORD"):
                data += f"{name},sha256={digest},{len(content)}\n".encode()
            new.writestr(info, data)


class EditableWheel(editable_wheel):
    """setuptools' own, and the folder with the link."""

    def run(self) -> None:
        """Write the wheel into ``dist_dir``."""
        super().run()
        if link_package():
            for wheel in Path(self.dist_dir).glob("radixkv-*.editable-*.whl"):
                name_folder(wheel)


setup(cmdclass={"editable_wheel": EditableWheel})
