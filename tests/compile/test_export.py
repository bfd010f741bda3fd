"""Does a layer go through torch.export and AOTInductor, and then run in other processes?

Values are small integers and weights powers of two: the result is exact.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ep import (
    BootstrapConfig,
    GroupedGemmConfig,
    MoEEpCommParams,
    MoEEpConfigError,
    MoEEpInputError,
    MoEEpLayer,
    MoEEpStateError,
    SplitConfig,
    create_communication,
)
from tests.conftest import RunOnRanks
from tests.problems import expect, problem_of
from tests.ranks import RankContext
from tests.rounds.layers import random_inputs, random_state, small_integers

PARAMS = MoEEpCommParams(4, 2, 11, 16)  # of no other test: a program counts those that are made
KERNEL = GroupedGemmConfig(intermediate_size=16, activation="relu")
TOKENS = (5, 3, 8, 0, 1)


class Model(nn.Module):
    """Two layers that share a workspace, and that no data orders."""

    def __init__(self, bootstrap: BootstrapConfig, backend: str) -> None:
        super().__init__()
        split = SplitConfig(comm=backend, kernel=KERNEL)
        self.first, self.second = (MoEEpLayer(bootstrap, PARAMS, split) for _ in range(2))
        for layer in (self.first, self.second):
            layer.load_full_state_dict(random_state(PARAMS, KERNEL, small_integers))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        others = torch.where(ids < 0, ids, 3 - ids)
        return self.first(x, ids, weights) - self.second(x, others, weights) * 2

    def destroy(self) -> None:
        self.first.destroy()
        self.second.destroy()


def export(model: nn.Module, strict: bool = False) -> Any:
    count = torch.export.Dim("n", max=PARAMS.max_tokens_per_rank)
    sizes = {"dynamic_shapes": [{0: count}] * 3, "strict": strict}
    return torch.export.export(model, random_inputs(PARAMS, 5, small_integers, 0), **sizes)


def inputs_of(rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [random_inputs(PARAMS, max(0, n - rank), small_integers, 10 * n + rank) for n in TOKENS]


def with_a_wrong_id(given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    x, ids, weights = given
    wrong = ids.clone()
    wrong[0, 0] = PARAMS.num_experts
    return x, wrong, weights


def export_and_run(context: RankContext, folder: str) -> list[Tensor]:
    """Body: leave the program in the folder, and return what eager code makes."""
    model = Model(context.bootstrap(), "cake")
    with torch.no_grad():
        torch.export.save(export(model), f"{folder}/{context.rank}.pt2")
        outputs = [model(*given) for given in inputs_of(context.rank)]
    model.destroy()
    return outputs


def load_and_run(context: RankContext, folder: str) -> list[Tensor]:
    """Body: run the program with communications of this process."""
    comms = [create_communication(context.bootstrap(), PARAMS, "cake") for _ in range(2)]
    program = torch.export.load(f"{folder}/{context.rank}.pt2").module()
    with torch.no_grad():
        outputs = [program(*given) for given in inputs_of(context.rank)]
    for comm in comms:
        comm.destroy()
    return outputs


@pytest.mark.multirank
def test_a_program_runs_in_other_processes(ranks: RunOnRanks, tmp_path: Path) -> None:
    how = {"folder": str(tmp_path)}
    eager = ranks(2, export_and_run, **how)
    for want, loaded in zip(eager, ranks(2, load_and_run, dedicated=True, **how), strict=True):
        assert loaded.value is not None, loaded.error
        assert all(map(torch.equal, loaded.value, want)), (loaded.value, want)


class Calls(nn.Module):
    """Two layers, and nothing for Inductor to generate but the calls: that saves many seconds."""

    def __init__(self) -> None:
        super().__init__()
        bootstrap = BootstrapConfig(1, 0, device="cpu")
        self.first, self.second = (MoEEpLayer(bootstrap, PARAMS, "cake") for _ in range(2))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x, ids, weights), self.second(x, ids)


@pytest.mark.slow
def test_aot_inductor_compiles_a_program(tmp_path: Path) -> None:
    quickly = {
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "aot_inductor.precompile_headers": False,
    }
    model = Calls()
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(
            export(model), package_path=str(tmp_path / "model.pt2"), inductor_configs=quickly
        )
        compiled = torch._inductor.aoti_load_package(package)
        for given in inputs_of(0):
            assert all(map(torch.equal, compiled(*given), model(*given)))
        said = problem_of(compiled, *with_a_wrong_id(inputs_of(0)[0]))
        # C++ stands between: the class is gone, and its name is in front of the message.
        expect(said, RuntimeError, ["MoEEpInputError: rank 0 passed 1 expert id"])
    model.first.destroy()
    model.second.destroy()


@pytest.mark.parametrize(
    ("backend", "strict"), [("cake", False), ("cake", True), ("torch_dist", False)]
)
def test_a_program_takes_no_workspace_along(backend: str, strict: bool) -> None:
    model = Model(BootstrapConfig(1, 0, device="cpu"), backend)
    with torch.no_grad():
        program = export(model, strict)
        assert program.constants == {}
        for given in inputs_of(0):
            assert torch.equal(program.module()(*given), model(*given))
        said = problem_of(program.module(), *with_a_wrong_id(inputs_of(0)[0]))
        expect(said, MoEEpInputError, ["rank 0 passed 1 expert id"])
    model.destroy()


def test_a_program_without_its_communication_names_it() -> None:
    name = "communication 1 of rank 0 of 2 with other params"
    ids, mask = torch.zeros(2, 2, dtype=torch.int64), None
    what = (torch.zeros(2, 16), torch.zeros(0), ids, mask, name, 2, 2, 8, False, False, False)
    problem = problem_of(torch.ops.moe_ep.round_combine, *what)
    expect(problem, MoEEpStateError, [name, "in the same order"])


def test_an_export_that_fails_leaves_the_communication_as_it_was() -> None:
    class Fails(Model):
        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            received = self.first.communication.dispatch(x, ids, weights)
            raise ArithmeticError(received.tokens_per_rank)

    model = Fails(BootstrapConfig(1, 0, device="cpu"), "cake")
    with pytest.raises(ArithmeticError):
        export(model)
    given = inputs_of(0)[0]
    assert torch.equal(Model.forward(model, *given), Model.forward(model, *given))


def test_gradients_that_a_program_does_not_have_are_not_left_out_silently() -> None:
    model = Model(BootstrapConfig(1, 0, device="cpu"), "torch_dist")
    run = export(model).module()
    x, ids, weights = inputs_of(0)[0]
    problem = problem_of(run, x.requires_grad_(), ids, weights)
    expect(problem, MoEEpConfigError, ["inputs that do not"])
