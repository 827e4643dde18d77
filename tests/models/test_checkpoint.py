"""Checkpoints: found where the user says, and every way in which one is not the right one named."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from h3compile.errors import CheckpointError
from h3compile.models.checkpoint import RELEASE, Partition, check, find_checkpoint, open_partition
from h3compile.models.h3 import ARCHITECTURE, RELEASE_CONFIG

FILE = "diffusion_pytorch_model.safetensors"
TENSORS = {"proj_in.weight": torch.zeros(4, 3), "context_embedder.weight": torch.zeros(4, 2).bfloat16()}
EXPECTED = {
    "proj_in.weight": ((4, 3), torch.float32),
    "context_embedder.weight": ((4, 2), None),
}


def write_partition(folder: Path, **fields: object) -> Path:
    folder.mkdir(parents=True)
    config = {"_class_name": ARCHITECTURE, "_diffusers_version": "0.42.1", **RELEASE_CONFIG, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(TENSORS, folder / FILE)
    return folder


def write_pipeline(root: Path) -> Path:
    write_partition(root / "transformer")
    write_partition(root / "transformer_ref", num_layers=3)
    (root / "modular_model_index.json").write_text("{}")
    return root


def opened(folder: Path) -> Partition:
    return open_partition(find_checkpoint(str(folder)), "transformer")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None) -> Path:
    """An empty Hugging Face cache."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


def test_a_pipeline_folder_has_both_partitions(tmp_path: Path) -> None:
    root = write_pipeline(tmp_path / "h3")
    found = find_checkpoint(str(root))
    assert found.root == root
    assert dict(found.partitions) == {
        "transformer": root / "transformer",
        "transformer_ref": root / "transformer_ref",
    }
    partition = open_partition(found, "transformer_ref")
    assert partition.config == {**RELEASE_CONFIG, "num_layers": 3}
    assert torch.equal(partition.tensors.read("proj_in.weight"), TENSORS["proj_in.weight"])


@pytest.mark.parametrize("name", ["transformer", "transformer_ref"])
def test_a_partition_itself_names_its_pipeline(tmp_path: Path, name: str) -> None:
    root = write_pipeline(tmp_path / "h3")
    found = find_checkpoint(str(root / name))
    assert found.root == root
    assert dict(found.partitions) == {name: root / name}


def test_a_lone_partition_is_the_first_one(tmp_path: Path) -> None:
    folder = write_partition(tmp_path / "weights")
    found = find_checkpoint(str(folder))
    assert found.root == folder
    assert dict(found.partitions) == {"transformer": folder}


def test_relative_and_home_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_pipeline(tmp_path / "h3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_checkpoint("h3").root == find_checkpoint("~/h3").root == root


def test_a_repository_in_the_cache(cache: Path) -> None:
    base = cache / "models--org--h3"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text(commit)
    root = write_pipeline(base / "snapshots" / commit)
    assert find_checkpoint("org/h3").root == root


def test_a_repository_of_which_only_a_part_was_downloaded(cache: Path) -> None:
    base = cache / "models--org--h3"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text(commit)
    (base / "snapshots" / commit / "vae").mkdir(parents=True)
    message = "org/h3 is in the local Hugging Face cache without its transformer: run hf download org/h3"
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint("org/h3")


def test_a_repository_that_was_not_downloaded(cache: Path) -> None:
    message = f"{RELEASE} is no folder and is not in the local Hugging Face cache: run hf download {RELEASE}"
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(RELEASE)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("tiny", "no tiny checkpoint yet: write one with h3compile tiny DIR"),
        ("nowhere", "there is no model 'nowhere': give a folder, or a repository id"),
        ("./not/here", "there is no model './not/here'"),
        ("/not/here", "there is no model '/not/here'"),
        ("a/b/c", "there is no model 'a/b/c'"),
        ("", "there is no model ''"),
        ("org/-bad..name", "org/-bad..name is no folder and is not in the local Hugging Face cache"),
    ],
)
def test_no_such_model(cache: Path, monkeypatch: pytest.MonkeyPatch, model: str, message: str) -> None:
    monkeypatch.chdir(cache)
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(model)


LAYOUTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda d: None, "holds no safetensors of a transformer"),
    "other folders": (lambda d: (d / "unet").mkdir(), "holds no safetensors of a transformer"),
    "original": (
        lambda d: (d / "FL2VA" / "transformer").mkdir(parents=True),
        r"is the original layout \(FL2VA\), which is not read yet",
    ),
    "original, ref": (lambda d: (d / "Ref2VA").mkdir(), r"is the original layout \(Ref2VA\)"),
    "comfy": (
        lambda d: (d / "minimax_h3_fl2va_bf16.safetensors").touch(),
        "minimax_h3_fl2va_bf16.safetensors is a single-file checkpoint, which is not read yet",
    ),
    "gguf": (lambda d: (d / "h3-Q4_K.gguf").touch(), "h3-Q4_K.gguf is a GGUF file, which is not read yet"),
    "another model": (
        lambda d: (d / "config.json").write_text('{"_class_name": "WanTransformer3DModel"}'),
        f"is the config of 'WanTransformer3DModel', not of {ARCHITECTURE}",
    ),
    "no class": (lambda d: (d / "config.json").write_text("{}"), "is the config of None, not of"),
    "no JSON": (lambda d: (d / "config.json").write_text("{"), "config.json cannot be read"),
    "no object": (lambda d: (d / "config.json").write_text("[]"), "config.json is not a configuration"),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_other_layouts_are_recognised(tmp_path: Path, kind: str) -> None:
    make, message = LAYOUTS[kind]
    make(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        find_checkpoint(str(tmp_path))
    assert caught.value.mend


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("minimax_h3_fl2va_bf16.safetensors", "is a single-file checkpoint, which is not read yet"),
        ("h3.gguf", "is a GGUF file, which is not read yet"),
        ("h3.ckpt", "is a file, not a checkpoint folder"),
    ],
)
def test_a_file_is_no_checkpoint(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=f"{name} {message}"):
        find_checkpoint(str(tmp_path / name))


def test_an_unknown_partition_names_the_nearest(tmp_path: Path) -> None:
    found = find_checkpoint(str(write_pipeline(tmp_path / "h3")))
    with pytest.raises(
        CheckpointError, match="no partition 'transformer_rf': did you mean 'transformer_ref'"
    ):
        open_partition(found, "transformer_rf")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"_class_name": "Other"}, "is the config of 'Other', not of"),
        ({"num_layers": "50"}, 'has num_layers = "50": it must be like 50'),
        ({"num_layers": 0}, "has num_layers = 0"),
        ({"num_layers": 2.5}, "has num_layers = 2.5"),
        ({"num_layers": True}, "has num_layers = true"),
        ({"norm_eps": "tiny"}, 'has norm_eps = "tiny": it must be like 1e-05'),
        ({"norm_eps": -1e-5}, "has norm_eps = -1e-05"),
        ({"patch_size": [1, 2]}, r"has patch_size = \[1, 2\]: it must be like \[1, 2, 2\]"),
        ({"patch_size": 2}, "has patch_size = 2"),
        ({"patch_size": [1, 2, 0]}, r"has patch_size = \[1, 2, 0\]"),
        ({"quantization_config": {"quant_algo": "FP8"}}, "is a quantized checkpoint: give the BF16 release"),
    ],
)
def test_a_wrong_config(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    write_partition(tmp_path / "transformer", **fields)
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path)


def test_a_config_without_a_field(tmp_path: Path) -> None:
    path = write_partition(tmp_path / "transformer") / "config.json"
    config = json.loads(path.read_text())
    del config["rope_theta"]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json lacks the field rope_theta"):
        opened(tmp_path)


def test_whole_numbers_are_floats_where_floats_belong(tmp_path: Path) -> None:
    write_partition(tmp_path / "transformer", rope_theta=10000)
    theta = opened(tmp_path).config["rope_theta"]
    assert (type(theta), theta) == (float, 10000.0)


def test_a_partition_without_weights(tmp_path: Path) -> None:
    folder = write_partition(tmp_path / "transformer")
    (folder / FILE).unlink()
    with pytest.raises(CheckpointError, match="transformer has no safetensors file"):
        opened(tmp_path)
    (folder / "h3.gguf").touch()
    with pytest.raises(CheckpointError, match=r"h3\.gguf is a GGUF file"):
        opened(tmp_path)


def test_a_truncated_shard(tmp_path: Path) -> None:
    file = write_partition(tmp_path / "transformer") / FILE
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{FILE} is truncated"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("blocks.0.attn.qkv_proj.weight", "has the original names .* not read yet"),
        ("adaln_t_table", "is a pruned ComfyUI checkpoint"),
        ("transformer_blocks.0.attn.to_q.weight_scale", "is a quantized checkpoint"),
        ("blocks.0.mlp.fc1.comfy_quant", "is a quantized checkpoint"),
    ],
)
def test_other_names_in_the_right_folder(tmp_path: Path, key: str, message: str) -> None:
    folder = write_partition(tmp_path / "transformer")
    save_file({key: torch.zeros(1)}, folder / FILE)
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path)


def test_what_the_model_expects(tmp_path: Path) -> None:
    write_partition(tmp_path / "transformer")
    check(opened(tmp_path), EXPECTED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"b{i}": ((1,), None) for i in range(9)}, r"lacks 9 tensors \(b0, b1, b2, ...\)"),
        ({"bias": ((1,), None)}, r"lacks 1 tensor \(bias\)"),
        ({"proj_in.weight": None}, r"has 1 unexpected tensor \(proj_in.weight\)"),
        (
            {"proj_in.weight": ((3, 4), torch.float32)},
            r"has 1 tensor \(proj_in.weight is \[4, 3\], not \[3, 4\]\) of the wrong shape",
        ),
        (
            {"proj_in.weight": ((4, 3), torch.bfloat16)},
            r"has 1 tensor \(proj_in.weight is float32, not bfloat16\) of the wrong dtype",
        ),
    ],
)
def test_what_the_model_does_not_expect(tmp_path: Path, change: dict, message: str) -> None:
    write_partition(tmp_path / "transformer")
    expected = {key: value for key, value in {**EXPECTED, **change}.items() if value is not None}
    with pytest.raises(CheckpointError, match=message) as caught:
        check(opened(tmp_path), expected)
    assert "\n" not in str(caught.value)
