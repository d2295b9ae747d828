"""A checkpoint of any strategy becomes a folder that `from_pretrained` loads, with the same outputs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

import transformers

from lightning_paral.checkpoint.load import load
from lightning_paral.distributed.exchange import RankGroup
from tests.models.hugging_face import config_of, fit_and_save, made, outputs, tokens

KINDS = (
    "GPT2LMHeadModel",
    "T5ForConditionalGeneration",
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "BertForSequenceClassification",
)


@pytest.fixture(scope="module")
def fitted(rank_pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that creates a checkpoint once, and returns its path and the logits of the trained model."""
    folder, done = tmp_path_factory.mktemp("fitted"), {}

    def fit(label: str, num_ranks: int, kind: str, extra: str = "", precision: Any = None) -> tuple[Path, Any]:
        key = (label, num_ranks, kind, extra, precision)
        if key not in done:
            path = folder / str(len(done))
            logits = rank_pool.run(num_ranks, fit_and_save, label, num_ranks, str(path), kind, extra, precision)
            done[key] = path, logits[0]
        return done[key]

    return fit


@pytest.fixture
def consolidate(paral) -> Any:
    """A function that runs the command and returns the names of the files that it wrote, or its error."""

    def run(*arguments: Any) -> list[str] | str:
        said = paral("consolidate", *arguments)
        return said if said.startswith("paral: ") else [Path(line).name for line in said.splitlines()]

    return run


def reload(folder: Path, kind: str, **options: Any) -> Any:
    """Load like a user, and assert that no weight is missing, unexpected, or of a different shape."""
    model, info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model


def assert_outputs(folder: Path, expected: Any, kind: str = "GPT2LMHeadModel", tolerance: float = 0.0) -> None:
    found = outputs(reload(folder, kind)).to(expected.dtype)
    torch.testing.assert_close(found, expected, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "label", "extra"),
    [
        *((kind, label, "") for kind in KINDS for label in ("paral_ddp", "paral_fsdp")),
        *(("GPT2LMHeadModel", label, "") for label in ("paral_dp", "paral_zero2", "paral_zero3")),
        *(("GPT2LMHeadModel", "paral_ddp", extra) for extra in ("compiled", "compiled inside")),
    ],
)
def test_folder_is_the_one_that_save_pretrained_writes(
    fitted, consolidate, tmp_path: Path, kind: str, label: str, extra: str
) -> None:
    path, logits = fitted(label, 1 if label in ("paral_dp", "paral_ddp") else 2, kind, extra)
    assert not torch.equal(logits, outputs(made(kind))), "it was trained"
    files = consolidate(path, tmp_path / "ours", "--hugging-face")
    exact = label in ("paral_ddp", "paral_fsdp") and not extra
    assert_outputs(tmp_path / "ours", logits, kind, tolerance=0.0 if exact else 1e-6)
    reload(tmp_path / "ours", kind).save_pretrained(tmp_path / "theirs")
    names = {file.name for file in (tmp_path / "ours").iterdir()}
    assert set(files) == names == {file.name for file in (tmp_path / "theirs").iterdir()}
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    for name in (name for name in names if name.endswith("config.json")):
        ours, theirs = (json.loads((tmp_path / by / name).read_text()) for by in ("ours", "theirs"))
        assert ours == theirs


def test_shards_with_an_index(fitted, consolidate, tmp_path: Path) -> None:
    path, logits = fitted("paral_fsdp", 2, "LlamaForCausalLM")
    files = consolidate(path, tmp_path / "out", "--hugging-face", "--max-shard-size", "4KB")
    assert "model.safetensors.index.json" in files
    assert "model-00001-of-00007.safetensors" in files
    assert_outputs(tmp_path / "out", logits, "LlamaForCausalLM")


def test_dtype_equals_that_of_the_config(fitted, consolidate, tmp_path: Path) -> None:
    path, _ = fitted("paral_ddp", 1, "GPT2LMHeadModel")
    consolidate(path, tmp_path / "out", "--hugging-face", "--dtype", "bf16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    model = reload(tmp_path / "out", "GPT2LMHeadModel")
    assert model.dtype == torch.bfloat16
    expected = load(path, RankGroup())["state_dict"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[f"model.{name}"].bfloat16())


def test_true_low_precision_is_kept(fitted, consolidate, tmp_path: Path) -> None:
    path, logits = fitted("paral_fsdp", 2, "GPT2LMHeadModel", precision="bf16-true")
    consolidate(path, tmp_path / "out", "--hugging-face")
    assert reload(tmp_path / "out", "GPT2LMHeadModel").dtype == torch.bfloat16
    assert_outputs(tmp_path / "out", logits)


def test_omitted_weights_beside_the_model_are_named(fitted, consolidate, tmp_path: Path) -> None:
    path, logits = fitted("paral_ddp", 1, "GPT2LMHeadModel", "head")
    said = consolidate(path, tmp_path / "out", "--hugging-face")
    assert "2 of 31 names do not begin with 'model.'" in said
    assert "head.weight, head.bias" in said
    assert not list(tmp_path.iterdir())
    consolidate(path, tmp_path / "out", "--hugging-face", "--only-prefix")
    assert_outputs(tmp_path / "out", logits)


def test_one_of_several_models_must_be_chosen(fitted, consolidate, tmp_path: Path) -> None:
    path, logits = fitted("paral_ddp", 1, "GPT2LMHeadModel", "teacher")
    said = consolidate(path, tmp_path / "out", "--hugging-face")
    choices = "2 Hugging Face models, and one must be chosen: --strip-prefix model., --strip-prefix teacher.."
    assert choices in said
    assert choices in consolidate(path, tmp_path / "out", "--hugging-face", "--strip-prefix", "x")
    consolidate(path, tmp_path / "out", "--hugging-face", "--strip-prefix", "model", "--only-prefix")
    assert_outputs(tmp_path / "out", logits)
    consolidate(path, tmp_path / "second", "--hugging-face", "--strip-prefix", "teacher.", "--only-prefix")
    expected = outputs(made("LlamaForCausalLM"))
    assert_outputs(tmp_path / "second", expected, "LlamaForCausalLM")


def test_checkpoints_without_a_config_become_safetensors_beside_one(fitted, consolidate, tmp_path: Path) -> None:
    path, logits = fitted("paral_ddp", 1, "T5ForConditionalGeneration")
    foreign, out = tmp_path / "foreign.ckpt", tmp_path / "out"
    torch.save({"state_dict": torch.load(path)["state_dict"]}, foreign)
    said = consolidate(foreign, out, "--hugging-face")
    assert "0 Hugging Face models, and one must be chosen: none" in said
    assert "write FOLDER/model.safetensors --strip-prefix PREFIX, and save the model's config" in said
    assert not out.exists()
    made("T5ForConditionalGeneration").config.save_pretrained(out)
    consolidate(foreign, out / "model.safetensors", "--strip-prefix", "model.")
    model = reload(out, "T5ForConditionalGeneration")
    torch.testing.assert_close(outputs(model), logits, rtol=0.0, atol=0.0)
    assert len(load_file(out / "model.safetensors")) == len(model.state_dict()) - 3, "tied"


def test_existing_folder_is_left_alone(fitted, consolidate, tmp_path: Path) -> None:
    path, _ = fitted("paral_ddp", 1, "GPT2LMHeadModel")
    assert "exists. Write to a new folder" in consolidate(path, tmp_path, "--hugging-face")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["tied by the config", "frozen"])
def test_weights_that_loading_would_change_are_named(fitted, consolidate, tmp_path: Path, fault: str) -> None:
    path, _ = fitted("paral_ddp", 1, "GPT2LMHeadModel")
    checkpoint = torch.load(path)
    weights = checkpoint["state_dict"]
    if fault == "frozen":
        del weights["model.transformer.wpe.weight"]
    else:
        weights["model.lm_head.weight"] = weights["model.lm_head.weight"] + 1
    torch.save(checkpoint, tmp_path / "x.ckpt")
    said = consolidate(tmp_path / "x.ckpt", tmp_path / "out", "--hugging-face")
    reason = "Missing in the checkpoint: transformer.wpe" if fault == "frozen" else "Tied by the config, but different"
    assert reason in said
    assert [file.name for file in tmp_path.iterdir()] == ["x.ckpt"]


# Names


@pytest.mark.parametrize("extra", ["", "head"])
def test_prefix_is_stripped(fitted, consolidate, tmp_path: Path, extra: str) -> None:
    path, logits = fitted("paral_ddp", 1, "GPT2LMHeadModel", extra)
    config_of("GPT2LMHeadModel").save_pretrained(tmp_path)
    options = ["--strip-prefix", "model.", *(["--only-prefix"] if extra else [])]
    assert consolidate(path, tmp_path / "model.safetensors", *options) == ["model.safetensors"]
    assert_outputs(tmp_path, logits)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--strip-prefix", "net."], "No weight's name begins with 'net.'. They begin with: head, model."),
        (["--strip-prefix", "mod"], "No weight's name begins with 'mod.'"),
        (["--strip-prefix", "model"], "2 of 31 names do not begin with 'model.', and would be lost. They are: head.w"),
        (["--only-prefix"], "--only-prefix needs --strip-prefix"),
    ],
)
def test_invalid_prefixes_are_named(fitted, consolidate, tmp_path: Path, options: Any, reason: str) -> None:
    path, _ = fitted("paral_ddp", 1, "GPT2LMHeadModel", "head")
    assert reason in consolidate(path, tmp_path / "x.safetensors", *options)
    assert "--strip-prefix needs safetensors" in consolidate(path, tmp_path / "x.ckpt", "--strip-prefix", "model.")
    assert not list(tmp_path.iterdir())


# Files of others and checkpoints are not changed


def test_file_that_is_named_is_replaced(fitted, consolidate, tmp_path: Path) -> None:
    path, _ = fitted("paral_ddp", 1, "GPT2LMHeadModel")
    save_file({"x": tokens()}, tmp_path / "model.safetensors")
    assert consolidate(path, tmp_path / "model.safetensors") == ["model.safetensors"]
    assert "x" not in load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["x.ckpt", "new/x.safetensors", "folder"])
def test_nothing_is_written_into_the_checkpoint(fitted, consolidate, name: str) -> None:
    path, _ = fitted("paral_fsdp", 2, "GPT2LMHeadModel")
    before = sorted(file.name for file in path.iterdir())
    said = consolidate(path, path / name, *(["--hugging-face"] if name == "folder" else []))
    assert f"is the checkpoint {path}, or inside it" in said
    assert sorted(file.name for file in path.iterdir()) == before
