"""metrics.csv: rows at once, columns that come later, and going on in the same file."""

from __future__ import annotations

from pathlib import Path

from mlframe.rows import Rows, read_rows


def test_rows_are_written_at_once_and_late_columns_are_added(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "run")
    rows.log_metrics({"loss": 1.5, "total_flops": 2**60 + 1}, 0)
    assert read_rows(tmp_path / "run" / "metrics.csv") == [{"step": "0", "loss": "1.5", "total_flops": str(2**60 + 1)}]
    rows.log_metrics({"acc": 0.5}, 1)
    rows.log_metrics({"loss": 1.0}, 2)
    table = read_rows(rows.path)
    assert [(row["step"], row["loss"], row["acc"]) for row in table] == [
        ("0", "1.5", ""),
        ("1", "", "0.5"),
        ("2", "1.0", ""),
    ]
    assert [path.name for path in rows.path.parent.iterdir()] == ["metrics.csv"]


def test_a_resumed_run_replaces_the_rows_of_lost_steps(tmp_path: Path) -> None:
    before = Rows(tmp_path)
    for step in range(0, 50, 10):
        before.log_metrics({"loss": step, "old": 1}, step)
    resumed = Rows(tmp_path)
    for step in range(30, 60, 10):
        resumed.log_metrics({"loss": -step}, step)
    table = read_rows(tmp_path / "metrics.csv")
    assert [(int(row["step"]), float(row["loss"])) for row in table] == [
        (0, 0),
        (10, 10),
        (20, 20),
        (30, -30),
        (40, -40),
        (50, -50),
    ]


def test_no_file_is_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "none.csv") == []


def test_a_row_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    """Its step could be read as an earlier one: 1 of 12."""
    rows = Rows(tmp_path)
    for step in range(13):
        rows.log_metrics({"loss": 0.5}, step)
    text = rows.path.read_bytes()
    rows.path.write_bytes(text[: text.rindex(b"12") + 1])
    assert [row["step"] for row in read_rows(rows.path)] == [str(step) for step in range(12)]
    Rows(tmp_path).log_metrics({"loss": 0.5}, 12)
    assert rows.path.read_bytes() == text
