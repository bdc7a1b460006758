"""`mlframe-train` as a user runs it: in a process, in an empty folder, on a machine without network or key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUARD = """
import socket

def refuse(self, address, connect=socket.socket.connect):
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
        open("connections.txt", "a").write(repr(address))
        raise OSError(f"connection tried: {address}")
    return connect(self, address)

socket.socket.connect = refuse
"""


class Box:
    """A fresh machine: an empty home, no key, no terminal, no network beyond itself."""

    def __init__(self, folder: Path, images: Path) -> None:
        self.folder, self.images = folder / "cwd", images
        self.path = [str(folder / "guard"), str(ROOT)]
        for name in ("cwd", "home", "guard"):
            (folder / name).mkdir()
        (folder / "guard" / "sitecustomize.py").write_text(GUARD)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "HYDRA", "MLFRAME", "PYTHON"))}
        self.env = {**kept, "HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self.env |= {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"}

    def run(self, *arguments: str, command: list[str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*(command or [sys.executable, "-m", "mlframe.train"]), *arguments], cwd=self.folder, text=True,
            timeout=600, env={**self.env, "PYTHONPATH": os.pathsep.join(self.path)}, stdin=subprocess.DEVNULL,
            capture_output=True,
        )  # fmt: skip

    def smoke(self, *overrides: str) -> list[str]:
        """The default experiment on the 200 images, in 16 steps."""
        return [
            "experiment=deit_fashion", "data=image_folder", f"data.source.folder={self.images}", "data.workers=0",
            "data.batch_size=16", "steps=16", "trainer.val_check_interval=5", "trainer.log_every_n_steps=1", *overrides,
        ]  # fmt: skip
