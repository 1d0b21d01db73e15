"""Puts into a wheel what a checkout has at its root: configurations, checkpoints, recordings."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = (
    "configs/*/*.yaml",
    "checkpoints/rl-router/*",
    *(
        f"checkpoints/smollm2-135m-instruct{reads}/*.{kind}"
        for reads in ("", "-prompt")
        for kind in ("json", "md", "safetensors")
    ),
    "recordings/*.parquet",
)


class BuildWithShipped(build_py):
    """Copies them beside `data_collection.files`, which finds them there."""

    def run(self) -> None:
        """Build the packages, and unless they are used where they are, what they ship."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "data_collection" / "shipped"
        for pattern in SHIPPED:
            for path in Path().glob(pattern):
                self.mkpath(str((target / path).parent))
                self.copy_file(str(path), str(target / path))


setup(cmdclass={"build_py": BuildWithShipped})
