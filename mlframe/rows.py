"""The run's rows: metrics.csv, one row for each step that is logged."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class Rows(Logger):
    """Writes `folder`/metrics.csv, each row at once. Columns that come later are added, empty in earlier rows.

    A run that is resumed goes on in its file: rows from the first newly logged step on are those of the lost steps,
    and are replaced.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        self._columns: list[str] | None = None

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The configuration lies beside the rows, as config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {"step": step, **metrics}
        if self._columns is None:
            kept = [
                old
                for old in read_rows(self.path)
                if step is None or (old["step"].isdigit() and int(old["step"]) < step)
            ]
            self._rewrite(kept, row)
        elif set(row) - set(self._columns):
            self._rewrite(read_rows(self.path), row)
        assert self._columns is not None
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def _rewrite(self, rows: list[dict[str, str]], new: dict[str, Any]) -> None:
        known = list(rows[0]) if rows else self._columns or []
        self._columns = [*known, *(key for key in new if key not in known)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".csv.part")
        with beside.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(beside, self.path)


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """The rows of a metrics.csv, as text; "" where a row has no such metric. No file is no rows.

    A last row without its line's end is one that a kill cut off, and is left out.
    """
    path = Path(path)
    if not path.exists():
        return []
    with path.open(newline="") as file:
        text = file.read()
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline="")))
