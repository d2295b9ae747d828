"""Units are the repeated blocks of a module, or the submodules that the user chooses."""

import pytest
from torch import nn

from lightning_paral.engines.fsdp.shard import SMALL_BYTES, leave_small_to_root
from lightning_paral.model.units import Units, as_tree, choose_units, explain_single_unit
from tests.models.blocks import GPT2, T5, Block, Contrastive, LoRA, Tied, TiedBlocks


def names(units: Units) -> list[str]:
    return [unit.name for unit in units.inner]


def test_repeated_blocks_are_units_and_the_rest_is_the_root() -> None:
    model = Tied()

    units = choose_units(model)

    assert names(units) == ["blocks.0", "blocks.1", "blocks.2"]
    assert units.root.parameters == (model.embedding.weight,)
    assert units.bottom_up[-1] is units.root


@pytest.mark.parametrize("model", [Tied, TiedBlocks, LoRA, Contrastive, GPT2, T5])
@pytest.mark.parametrize("choice", [{}, {"units": ["Linear"]}, {"units": nn.Module}])
def test_every_parameter_is_in_exactly_one_unit(model: type[nn.Module], choice: dict) -> None:
    module = model()
    if choice == {"units": nn.Module}:
        choice = {"units": lambda name, part: not isinstance(part, nn.ModuleList)}
    if model in (GPT2,) and choice == {"units": ["Linear"]}:
        choice = {"units": ["Conv1D"]}

    units = choose_units(module, **choice)

    held = [parameter for unit in units.bottom_up for parameter in unit.parameters]
    assert len(held) == len(set(held))
    assert set(held) == set(module.parameters())


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (GPT2, ["model.transformer.h.0", "model.transformer.h.1"]),
        (T5, ["model.encoder.block.0", "model.decoder.block.0"]),
    ],
)
def test_transformers_name_the_modules_not_to_split(model: type[nn.Module], expected: list[str]) -> None:
    assert names(choose_units(model())) == expected


def test_norms_and_layers_inside_a_block_are_not_blocks() -> None:
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.ReLU())

    assert names(choose_units(layers())) == ["0", "2"]
    assert names(choose_units(nn.Sequential(layers(), layers()))) == ["0", "1"]


def test_tied_blocks_make_one_unit_of_their_nearest_callable_ancestor() -> None:
    model = nn.Module()
    model.trunk = nn.Sequential(*(Block() for _ in range(3)))
    model.trunk[2].up = model.trunk[0].up

    units = choose_units(model)

    assert names(units) == ["trunk", "trunk.1"]
    assert set(units.inner[0].parameters) == {*model.trunk[0].parameters(), *model.trunk[2].parameters()}
    assert names(choose_units(TiedBlocks())) == ["blocks.0"]


def test_module_used_twice_is_one_unit() -> None:
    block = Block()

    assert names(choose_units(nn.Sequential(block, Block(), block))) == ["0", "1"]


def test_classes_match_their_subclasses_by_name_or_as_type() -> None:
    class Special(Block):
        pass

    model = nn.ModuleList([Block(), Special()])

    assert names(choose_units(model, "Block")) == names(choose_units(model, Block)) == ["0", "1"]
    assert names(choose_units(model, [Special])) == ["1"]
    assert names(choose_units(model, lambda name, module: name == "1.up")) == ["1.up"]


def test_classes_of_the_same_name_are_all_chosen() -> None:
    twins = [type("Twin", (Block,), {}) for _ in range(2)]

    assert names(choose_units(nn.ModuleList(twin() for twin in twins), twins)) == ["0", "1"]


def test_tree_shows_equal_siblings_in_one_line() -> None:
    model = Tied()
    model.blocks.append(nn.Linear(16, 16))

    assert as_tree(choose_units(model, [Block, "Linear"])).splitlines()[:2] == [
        "Tied (the root): 320 parameters, 1.25 KiB",
        "├─ blocks.0 (Block): 32 parameters, 128 B",
    ]
    assert as_tree(choose_units(model)).splitlines() == [
        "Tied (the root): 592 parameters, 2.31 KiB",
        "└─ blocks.0 ... blocks.2 (Block): 3 x 1,632 parameters, 6.38 KiB",
    ]


def test_single_unit_is_explained_with_what_to_choose() -> None:
    message = explain_single_unit(choose_units(Contrastive()))

    assert "225 parameters" in message
    assert "units=[...]" in message


@pytest.mark.parametrize(
    ("num_blocks", "width", "kept"),
    [(200, 32, 0), (8, 32, 8), (40, 600, 40), (40, 300, 0)],
    ids=["many small", "few small", "many large", "many that fit in a bucket"],
)
def test_small_blocks_stay_in_the_root_under_fsdp(num_blocks: int, width: int, kept: int) -> None:
    blocks = nn.Sequential(*(nn.Linear(width, width, device="meta") for _ in range(num_blocks)))
    assert (num_blocks * width * (width + 1) * 4 > SMALL_BYTES) == (width == 600)

    assert len(leave_small_to_root(choose_units(blocks)).inner) == kept


def test_small_blocks_of_another_dtype_stay_units_under_fsdp() -> None:
    blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))
    blocks.append(nn.Linear(4, 4).bfloat16())

    assert names(leave_small_to_root(choose_units(blocks, ["Linear"]))) == [str(number) for number in range(41)]
