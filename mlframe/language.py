"""The language tasks: masked and causal language modelling on networks of Hugging Face transformers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertForMaskedLM, PreTrainedModel

from mlframe.linear_cross_entropy import linear_cross_entropy, token_scores
from mlframe.module import LevelModule


class Perplexity(MeanMetric):
    """exp of the mean loss of a token, over all batches and processes."""

    def compute(self) -> Tensor:
        return super().compute().exp()


def _metrics(vocab: int) -> nn.ModuleDict:
    accuracy = MulticlassAccuracy(vocab, average="micro", validate_args=False)
    return nn.ModuleDict({"loss": MeanMetric(), "ppl": Perplexity(), "acc": accuracy})


class LanguageModeling(LevelModule, ABC):
    """Cross-entropy of predicted tokens, and its mean, their perplexity and accuracy in evaluation.

    Every sample has equally many predictions, so the mean of a batch, of accumulated batches and of processes is the
    mean over tokens. A subclass says how a batch becomes the head's input.
    """

    unit = "tokens"
    logged = ("val/loss", "val/ppl", "val/acc", "train/loss", "train/lr")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sizes = self.plan.levels[0].sizes
        self.units = sizes["tokens"]
        self.metrics = nn.ModuleDict({stage: _metrics(sizes["vocab"]) for stage in ("val", "test")})

    @abstractmethod
    def hidden(self, batch: Any) -> tuple[Tensor, Tensor]:
        """What the head reads where something is predicted, [n, embed], and the tokens to predict, [n]."""

    def computes(self) -> nn.Module:
        assert isinstance(self.network, PreTrainedModel)
        return self.network.base_model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, targets = self.hidden(batch)
        loss = linear_cross_entropy(hidden, *self._head(), targets)
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log_rate()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _head(self) -> tuple[Tensor, Tensor | None]:
        assert isinstance(self.network, PreTrainedModel)
        head: Any = self.network.get_output_embeddings()
        return head.weight, head.bias

    def _evaluate(self, stage: str, batch: Any) -> None:
        hidden, targets = self.hidden(batch)
        losses, best = token_scores(hidden, *self._head(), targets)
        metrics: Any = self.metrics[stage]
        for name, metric in metrics.items():
            metric.update(*((best, targets) if name == "acc" else (losses,)))
            self.log(f"{stage}/{name}", metric, on_step=False, on_epoch=True, batch_size=len(targets))


class CausalLM(LanguageModeling):
    """Each token predicts the next. Batches are (ids [B, T], the tokens that follow [B, T]).

    Texts lie one after another in a row, as GPT-2 was trained: a token sees the end of the text before its own.
    """

    objective = "causal"

    def hidden(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        ids, targets = batch
        assert isinstance(self.network, PreTrainedModel)
        states = self.network.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return states.flatten(0, 1), targets.flatten()


class MaskedLM(LanguageModeling):
    """Masked tokens are predicted from both sides (Devlin et al., 2019, section 3.1; no next-sentence prediction).

    Batches are (ids with masks [B, T], the masked positions [B, P], the tokens there [B, P]). The head works on those
    positions alone, which saves most of its FLOPs: 85 % at a mask of 15 %.
    """

    objective = "masked"

    def hidden(self, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        ids, positions, targets = batch
        assert isinstance(self.network, BertForMaskedLM)
        states = self.network.bert(input_ids=ids).last_hidden_state
        rows = torch.arange(len(ids), device=ids.device)[:, None]
        return self.network.cls.predictions.transform(states[rows, positions].flatten(0, 1)), targets.flatten()
