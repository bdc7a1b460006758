"""timm's VisionTransformer: ViT, DeiT and distilled DeiT, with or without registers, LayerScale and qk-norm."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from timm.models import VisionTransformer, load_state_dict, load_state_dict_from_hf, save_for_hf
from torch import nn

from mlframe import flops
from mlframe.axes import Architecture, Sizes, check_nan
from mlframe.errors import ConfigError, check_whole


def _build(config: Mapping[str, Any]) -> nn.Module:
    """timm.create_model(**config); `model_name` says which VisionTransformer, every other key overrides it."""
    for key in ("patch_drop_rate", "dynamic_img_size", "dynamic_img_pad"):
        if config.get(key):
            raise ValueError(
                f"{key}={config[key]}: the number of tokens would vary, and the FLOPs with it; leave it out"
            )
    for key in ("pretrained", "checkpoint_path"):
        if config.get(key):
            raise ConfigError(f"model.config.{key}={config[key]}: weights to start from are named with init_from=...")
    for key in ("embed_dim", "depth", "num_heads", "in_chans"):
        if key in config:
            check_whole(f"model.config.{key}", config[key], 1)
    if "num_classes" in config:
        check_whole("model.config.num_classes", config["num_classes"], 2)
    width, heads = config.get("embed_dim"), config.get("num_heads")
    if width and heads and width % heads:
        raise ConfigError(
            f"model.config.num_heads={heads} does not divide the width, embed_dim={width}; choose a factor of it"
        )
    name = str(config.get("model_name"))
    if ":" not in name and not timm.is_model(name):
        near = ", ".join(difflib.get_close_matches(name, timm.list_models(), 3)) or "timm.list_models() names them"
        raise ConfigError(f"model.config.model_name={name}: timm has no such model; near it: {near}")
    network = timm.create_model(**config)
    if not isinstance(network, VisionTransformer):
        raise ValueError(f"{config['model_name']} is a {type(network).__name__}, not a timm VisionTransformer")
    patches: Any = network.patch_embed
    if any(size % patch for size, patch in zip(patches.img_size, patches.patch_size, strict=True)):
        raise ConfigError(f"model.config.patch_size: images of {patches.img_size} are no whole number of patches of "
                         f"{patches.patch_size}, so that their border would be cut off")  # fmt: skip
    return network


def _sizes(network: nn.Module) -> dict[str, int]:
    assert isinstance(network, VisionTransformer)
    block: Any = network.blocks[0]
    patches: Any = network.patch_embed
    return {
        "layers": len(network.blocks),
        "heads": block.attn.num_heads,
        "head_dim": block.attn.head_dim,
        "embed": network.embed_dim,
        "mlp": block.mlp.fc1.out_features,
        "classes": network.num_classes,
        "patches": patches.num_patches,
        "pixels": patches.proj.weight[0].numel(),
        "tokens": patches.num_patches + network.num_prefix_tokens,
        "classifiers": 2 if hasattr(network, "head_dist") else 1,
    }


def _resized(sizes: Sizes) -> dict[str, Any]:
    return {
        "depth": sizes["layers"],
        "num_heads": sizes["heads"],
        "embed_dim": sizes["embed"],
        "mlp_ratio": (sizes["mlp"] + 0.5) / sizes["embed"],  # timm rounds embed * ratio down
    }


def _save(network: nn.Module, config: Mapping[str, Any], folder: Path, about: Mapping[str, Any]) -> None:
    """timm's own form: model.safetensors, and config.json with the arguments, the preprocessing and the class names.

    about: `label_names`, and `data_config` (input_size, mean, std, interpolation, crop_pct).
    Loads with timm.create_model(model_name, checkpoint_path=FOLDER/model.safetensors, **model_args), and with
    timm.create_model("local-dir:FOLDER", pretrained=True).
    """
    save_for_hf(
        network,
        str(folder),
        model_config={"label_names": about["label_names"]},
        model_args={key: value for key, value in config.items() if key != "model_name"},
        safe_serialization=True,
        data_config=about["data_config"],
    )


def _load(network: nn.Module, source: str) -> None:
    """The weights of `source` into `network`: a file (.safetensors, .pth), a folder of `_save`, or hf-hub:ORG/NAME."""
    state = _read(source)
    found = {kind: sorted(keys) for kind, keys in _unlike(network.state_dict(), state).items() if keys}
    if found:
        what = "; ".join(f"{kind} {', '.join(keys[:4])}" for kind, keys in found.items())
        raise ValueError(f"{source} does not fit the network of model.config: {what}")
    check_nan(source, state)
    network.load_state_dict(state, strict=True)


def _read(source: str) -> Mapping[str, Any]:
    path = Path(source)
    if path.is_dir():
        path = path / "model.safetensors"
    if not source.startswith("hf-hub:") and not path.is_file():
        raise ValueError(f"{path} is not there: give a file, a folder such as a run's final/, or hf-hub:ORG/NAME")
    try:
        if source.startswith("hf-hub:"):
            return load_state_dict_from_hf(source.removeprefix("hf-hub:"), weights_only=True)
        return load_state_dict(str(path), use_ema=False, weights_only=True)
    except Exception as error:  # of timm, safetensors, torch or the hub, some of many lines
        raise ValueError(
            f"{source} cannot be loaded ({type(error).__name__}): is it whole, and weights alone?"
        ) from error


def _unlike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, list[str]]:
    both = ours.keys() & theirs.keys()
    return {
        "missing": list(ours.keys() - theirs.keys()),
        "unexpected": list(theirs.keys() - ours.keys()),
        "mismatched": [
            f"{key} {tuple(theirs[key].shape)} for {tuple(ours[key].shape)}"
            for key in both
            if ours[key].shape != theirs[key].shape
        ],
    }


VIT = Architecture(
    "vit",
    tensors={
        "{cls_token,dist_token,reg_token}": "_ _ embed",
        "pos_embed": "_ pos embed",
        "patch_embed.proj.weight": "embed <- _ _ _",
        "patch_embed.proj.bias": "embed",
        "{norm_pre,norm,fc_norm}.{weight,bias}": "embed",
        "blocks.{layers}.norm{1,2}.{weight,bias}": "embed",
        "blocks.{layers}.attn.qkv.weight": "(3 heads head_dim) <- embed",
        "blocks.{layers}.attn.qkv.bias": "(3 heads head_dim)",
        "blocks.{layers}.attn.{q,k}_norm.{weight,bias}": "head_dim",
        "blocks.{layers}.attn.proj.weight": "+ embed <- (heads head_dim)",
        "blocks.{layers}.attn.proj.bias": "+ embed",
        "blocks.{layers}.ls{1,2}.gamma": "embed",
        "blocks.{layers}.mlp.fc1.weight": "mlp <- embed",
        "blocks.{layers}.mlp.fc1.bias": "mlp",
        "blocks.{layers}.mlp.fc2.weight": "+ embed <- mlp",
        "blocks.{layers}.mlp.fc2.bias": "+ embed",
        "{head,head_dist}.weight": "classes <- embed",
        "{head,head_dist}.bias": "classes",
    },
    build=_build,
    sizes=_sizes,
    resized=_resized,
    flops=flops.vit,
    save=_save,
    load=_load,
)
