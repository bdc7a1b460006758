"""The language tasks: losses and gradients of transformers' own, evaluation by hand, and whole fits of seconds."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import LANGUAGE, TOKENS, VOCAB, Family, batch_for, language_module, tokens_for
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from mlframe.architectures import BERT
from mlframe.data.loader import Key, ResumableLoader, ResumableSampler
from mlframe.language import CausalLM, LanguageModeling, MaskedLM
from mlframe.ledger import Ledger
from mlframe.levels import make_levels
from mlframe.loop import VCycleLoop
from mlframe.operators import ties
from mlframe.plan import Plan, scratch, vcycle
from mlframe.rows import Rows, read_rows
from mlframe.schedule import Schedule

families = pytest.mark.parametrize("family", LANGUAGE.values(), ids=LANGUAGE)
KINDS = {name: LANGUAGE[name] for name in ("bert, norms around 1", "gpt2", "llama")}
kinds = pytest.mark.parametrize("family", KINDS.values(), ids=KINDS)


def their_loss(module: LanguageModeling, batch: tuple[Tensor, ...]) -> Tensor:
    """The loss of transformers: labels as long as the text, -100 where nothing is predicted, shifted if causal."""
    network: Any = module.network
    if isinstance(module, MaskedLM):
        ids, positions, targets = batch
        return network(input_ids=ids, labels=torch.full_like(ids, -100).scatter(1, positions, targets)).loss
    text = torch.cat([batch[0], batch[1][:, -1:]], 1)
    return network(input_ids=text, labels=text).loss


def gradients(module: LanguageModeling, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: x for name, x in zip(names, found, strict=True) if x is not None}


@families
def test_loss_and_gradients_are_those_of_transformers(family: Family) -> None:
    module, batch = language_module(family), batch_for(family)
    ours, theirs = module.training_step(batch, 0), their_loss(module, batch)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-6, atol=0)  # theirs is in float32
    mine, other = gradients(module, ours), gradients(module, theirs)
    # Untied, the bias of BERT's head stands twice in the network, and one of them is not used.
    assert mine.keys() == other.keys() >= dict(module.named_parameters()).keys() - {"network.cls.predictions.bias"}
    for name, x in mine.items():
        torch.testing.assert_close(x, other[name].to(x.dtype), rtol=1e-4, atol=1e-6, msg=name)


@kinds
def test_control_the_targets_matter(family: Family) -> None:
    module, batch = language_module(family), batch_for(family)
    moved = (*batch[:-1], batch[-1].roll(1, 1))
    assert abs(float((module.training_step(batch, 0) - module.training_step(moved, 0)).detach())) > 1e-3


def test_a_masked_token_is_predicted_at_its_own_place() -> None:
    family = KINDS["bert, norms around 1"]
    module = language_module(family)
    ids, positions, targets = batch_for(family)
    order = torch.tensor([2, 0, 3, 1])
    shuffled = ids, positions[:, order], targets[:, order]
    torch.testing.assert_close(module.training_step(shuffled, 0), module.training_step((ids, positions, targets), 0))
    wrong = ids, positions[:, order], targets
    assert abs(float((module.training_step(wrong, 0) - module.training_step(shuffled, 0)).detach())) > 1e-3


@families
def test_a_fresh_network_knows_nothing(family: Family) -> None:
    levels = make_levels(family.architecture, family.config, count=1, sample=family.sample)
    module = language_module(family)
    module.network = levels[0].build()
    loss = float(module.training_step(batch_for(family, 16), 0).detach())
    assert loss == pytest.approx(math.log(VOCAB), rel=0.05)


@kinds
def test_accumulated_gradients_are_those_of_the_whole_batch(family: Family) -> None:
    module, batch = language_module(family), batch_for(family, 4)
    whole = gradients(module, module.training_step(batch, 0))
    halves = [gradients(module, module.training_step(tuple(x[part] for x in batch), 0) / 2)
              for part in (slice(0, 2), slice(2, 4))]  # fmt: skip
    for name, x in whole.items():
        # transformers' Llama has its norms in float32.
        exact = 1e-5 if "llama" in family.architecture.name else 1e-12
        torch.testing.assert_close(halves[0][name] + halves[1][name], x, rtol=exact, atol=exact / 10, msg=name)


@kinds
@torch.no_grad()
def test_loss_perplexity_and_accuracy_of_batches_of_unequal_size(family: Family) -> None:
    module: Any = language_module(family)
    batches = [batch_for(family, rows, seed=rows) for rows in (5, 1, 2)]
    losses, right = [], []
    for i, batch in enumerate(batches):
        module.validation_step(batch, i)
        if family.architecture is BERT:
            rows = torch.arange(len(batch[0]))[:, None]
            logits = module.network(input_ids=batch[0]).logits[rows, batch[1]].flatten(0, 1)
        else:
            logits = module.network(input_ids=batch[0]).logits.flatten(0, 1)
        losses.append(functional.cross_entropy(logits, batch[-1].flatten(), reduction="none"))
        right.append(logits.argmax(1) == batch[-1].flatten())
    mean = torch.cat(losses).mean()
    found = {name: float(metric.compute()) for name, metric in module.metrics["val"].items()}
    assert found["loss"] == pytest.approx(float(mean), rel=1e-5)
    assert found["ppl"] == pytest.approx(float(mean.exp()), rel=1e-5)
    assert found["acc"] == pytest.approx(float(torch.cat(right).float().mean()), abs=1e-6)
    unweighted = torch.stack([loss.mean() for loss in losses])
    assert abs(float(unweighted.mean() - mean)) > 1e-3, "control: not the mean over batches"
    assert abs(float(unweighted.exp().mean() - mean.exp())) > 1e-2, "control: nor the mean of perplexities"


@torch.no_grad()
def test_accuracy_by_hand() -> None:
    """A head that is all bias says token 7 everywhere."""
    module: Any = language_module(LANGUAGE["bert"])
    for parameter in module.network.cls.predictions.parameters():
        parameter.zero_()
    module.network.cls.predictions.bias[7] = 5.0
    ids, positions, targets = batch_for(LANGUAGE["bert"], rows=2)
    targets = torch.full_like(targets, 3)
    targets[0, :3] = 7
    module.test_step((ids, positions, targets), 0)
    assert float(module.metrics["test"]["acc"].compute()) == pytest.approx(3 / 8)


# a fit of seconds


class Texts(Dataset):
    """Text i, with another mask in each epoch, as a batch of the task has it."""

    def __init__(self, family: Family, size: int) -> None:
        self.family, self.size = family, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: Key | int) -> tuple[Tensor, ...]:
        index, draw = (key, 0) if isinstance(key, int) else key
        return tuple(x[0] for x in batch_for(self.family, 1, seed=1000 * draw + index))


def plan_of(family: Family, *steps: Any, **settings: Any) -> Plan:
    return vcycle(make_levels(family.architecture, family.config, sample=family.sample), *steps, **settings)


def fit(
    family: Family, plan: Plan, batch: int = 4, ckpt: Path | None = None, callbacks: tuple[Any, ...] = (),
    init_from: str | None = None, **settings: Any,
) -> tuple[Any, pl.Trainer]:  # fmt: skip
    task = MaskedLM if family.architecture is BERT else CausalLM
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    module = task(plan, optimizer, Schedule("cosine", "phase", warmup=1), seed=1, init_from=init_from)
    settings = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "max_epochs": -1,
        "enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False,
        "val_check_interval": 4, "check_val_every_n_epoch": None, "log_every_n_steps": 1, "num_sanity_val_steps": 1,
        **settings,
    }  # fmt: skip
    trainer = pl.Trainer(**settings, max_steps=plan.steps, callbacks=[Ledger(), *callbacks])
    VCycleLoop.attach(trainer, module)
    train = ResumableLoader(Texts(family, 24), ResumableSampler(24, batch, seed=7))
    trainer.fit(module, train, DataLoader(Texts(family, 6), batch_size=4), ckpt_path=ckpt)
    return module, trainer


@kinds
def test_a_cycle_runs_every_phase_and_a_resume_ends_in_the_same_bits(family: Family, tmp_path: Path) -> None:
    plan = plan_of(family, 10, 3, 4, 0.25, split_noise=0.1)
    every = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    settings: dict[str, Any] = {"enable_checkpointing": True, "logger": Rows(tmp_path), "default_root_dir": tmp_path}
    whole, _ = fit(family, plan, callbacks=(every,), **settings)
    rows = read_rows(tmp_path / "metrics.csv")
    trained = [row for row in rows if row["train/loss"]]
    assert [int(row["phase"]) for row in trained] == [0] * 3 + [1] * 4 + [2] * 3
    assert [int(row["level"]) for row in trained] == [0] * 3 + [1] * 4 + [0] * 3
    assert [int(row["tokens"]) for row in trained] == [(i + 1) * 4 * TOKENS for i in range(10)]
    assert int(rows[-1]["total_flops"]) == plan.flops(4)
    validated = [row for row in rows if row["val/loss"]]
    assert len(validated) == 2
    for row in validated:
        assert float(row["val/ppl"]) == pytest.approx(math.exp(float(row["val/loss"])), rel=1e-4)
        assert 0 <= float(row["val/acc"]) <= 1
    assert (len(ties(whole.network.state_dict())) > 0) == whole.network.config.tie_word_embeddings
    for step in (3, 5, 8):
        anew = ModelCheckpoint(tmp_path / "anew", "{step}", every_n_train_steps=1)
        again: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path}
        resumed, _ = fit(family, plan, ckpt=tmp_path / f"step={step}.ckpt", callbacks=(anew,), **again)
        ours, theirs = resumed.network.state_dict(), whole.network.state_dict()
        assert all(torch.equal(ours[name], x) for name, x in theirs.items()), f"from step {step}"
        assert ties(ours) == ties(theirs)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_case_a2_half_the_micro_batch_accumulated_twice_costs_the_same(name: str, tmp_path: Path) -> None:
    family = LANGUAGE[name]
    plan = plan_of(family, 16, 4, 8, 0.5)
    large, small = plan.levels
    for accumulate, batch in ((1, 4), (2, 2)):
        folder = tmp_path / str(accumulate)
        fit(family, plan, batch, accumulate_grad_batches=accumulate, logger=Rows(folder), limit_val_batches=0)
        rows = read_rows(folder / "metrics.csv")
        flops = [int(row["total_flops"]) for row in rows]
        assert flops == sorted(flops)
        assert flops[-1] == 4 * (8 * large.flops + 8 * small.flops) == plan.flops(4)
        assert int(rows[-1]["tokens"]) == 16 * 4 * TOKENS


def test_a_short_text_is_learnt_by_heart() -> None:
    """What the fit minimises is the loss: of one text only, it falls from ln 128 to next to nothing."""
    family = LANGUAGE["gpt2"]
    levels = make_levels(family.architecture, family.config, sample=family.sample)
    module = language_module(family, scratch(levels, 10))
    module.network = levels[0].build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    text = tokens_for((1, TOKENS + 1))
    for _ in range(50):
        optimizer.zero_grad()
        loss = module.training_step((text[:, :-1], text[:, 1:]), 0)
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.2
