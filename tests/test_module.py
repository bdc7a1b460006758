"""The task: loss, mixing, weight decay, evaluation; and what is saved loads in the family's own library."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, VITS, images_for, randomised
from torch.nn import functional

from mlframe.architectures import VIT
from mlframe.levels import make_levels
from mlframe.module import ImageClassification
from mlframe.plan import scratch
from mlframe.schedule import Schedule


def module_of(config: dict[str, Any] = TINY, **settings: Any) -> ImageClassification:
    plan = scratch(make_levels(VIT, config), 10)
    made = ImageClassification(plan, partial(torch.optim.AdamW, lr=1.0, weight_decay=0.1), Schedule(), **settings)
    made.configure_model()
    made.log = made.log_dict = lambda *a, **k: None  # type: ignore[method-assign, assignment]
    made.log_rate = lambda: None  # type: ignore[method-assign]
    return made


BATCH = torch.randn(4, 1, 16, 16), torch.tensor([0, 3, 4, 3])


def test_the_loss_is_smoothed_cross_entropy() -> None:
    module = module_of(label_smoothing=0.1).eval()
    target = functional.one_hot(BATCH[1], 5) * 0.9 + 0.1 / 5
    by_hand = -(target * module.network(BATCH[0]).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(module.training_step(BATCH, 0), by_hand)


def test_mixup_mixes_images_and_labels_alike() -> None:
    module = module_of(label_smoothing=0.0, mixup={"mixup_alpha": 1.0}).eval()
    np.random.seed(5)
    np.random.rand()  # timm asks first whether to mix at all
    share = float(np.random.beta(1.0, 1.0))
    np.random.seed(5)
    images, labels = BATCH[0].clone(), BATCH[1]
    loss = module.training_step((images, labels), 0)
    mixed = BATCH[0] * share + BATCH[0].flip(0) * (1 - share)
    hot = functional.one_hot(labels, 5).float()
    target = hot * share + hot.flip(0) * (1 - share)
    by_hand = -(target * module.network(mixed).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(loss, by_hand, rtol=1e-5, atol=1e-6)


def test_norms_biases_and_tokens_are_not_decayed_and_all_else_is() -> None:
    module = module_of(VITS["distilled deit"])
    made: Any = module.configure_optimizers()
    decay = {id(p): group["weight_decay"] for group in made["optimizer"].param_groups for p in group["params"]}
    assert module.network is not None
    names = dict(module.network.named_parameters())
    assert len(decay) == len(names)
    decayed = {name for name, p in names.items() if decay[id(p)] == 0.1}
    assert {decay[id(p)] for p in names.values()} == {0.0, 0.1}
    assert decayed == {name for name in names if name.endswith("weight") and "norm" not in name}


def test_the_init_depends_on_seed_and_level_only() -> None:
    torch.manual_seed(1)
    first = module_of(seed=3)
    before = torch.get_rng_state()
    torch.manual_seed(2)
    again, other = module_of(seed=3), module_of(seed=4)
    weights = [m.network.head.weight for m in (first, again, other)]  # type: ignore[union-attr]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before), "building a network does not move the global stream"


@pytest.mark.parametrize("config", VITS.values(), ids=VITS)
def test_what_is_saved_loads_with_timm_in_a_fresh_process(config: dict[str, Any], tmp_path: Path) -> None:
    network = randomised(VIT.build(config)).float()
    images = images_for(config).float()
    about = {
        "label_names": list("abcde"),
        "data_config": {
            "input_size": (1, 16, 16),
            "mean": (0.3,),
            "std": (0.4,),
            "crop_pct": 1.0,
            "interpolation": "bicubic",
        },
    }
    VIT.save(network, config, tmp_path / "final", about)
    torch.save(images, tmp_path / "images.pt")
    script = f"""
import json, timm, torch
folder = {str(tmp_path)!r}
config = json.load(open(folder + "/final/config.json"))
images = torch.load(folder + "/images.pt")
weights = folder + "/final/model.safetensors"
one = timm.create_model({config["model_name"]!r}, checkpoint_path=weights, **config["model_args"])
two = timm.create_model("local-dir:" + folder + "/final", pretrained=True)
torch.save([net.eval()(images) for net in (one, two)], folder + "/logits.pt")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    for logits in torch.load(tmp_path / "logits.pt"):
        assert torch.equal(logits, network(images))
    saved = json.loads((tmp_path / "final" / "config.json").read_text())
    assert saved["label_names"] == list("abcde")
    assert saved["pretrained_cfg"]["mean"] == [0.3]
    assert saved["pretrained_cfg"]["input_size"] == [1, 16, 16]
