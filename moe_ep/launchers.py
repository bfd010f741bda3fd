"""Which launcher started this process, and as which rank of how many?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_ep.errors import MoEEpConfigError


@dataclass(frozen=True)
class LaunchedProcess:
    """This process as its launcher numbers it.

    local_rank: None where the launcher does not say.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None


@dataclass(frozen=True)
class _Launcher:
    name: str
    rank: str
    size: str
    local_rank: str


# In order of precedence. A launcher counts only when both its rank and size are there: a batch
# script of Slurm has SLURM_PROCID without a step, a process under PMIx has PMIX_RANK but the size
# only in its launcher's own variables.
_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    _Launcher(
        "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
    ),
    _Launcher("MPICH/Hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    _Launcher("PMIx under Slurm", "PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    _Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


def detect_launch(environment: Mapping[str, str]) -> LaunchedProcess | None:
    """Return what the launcher's variables say, or None if no launcher's are there.

    Raises MoEEpConfigError where they are not numbers or the rank is outside the size.
    """
    for launcher in _LAUNCHERS:
        if launcher.rank not in environment or launcher.size not in environment:
            continue
        rank = _number(environment, launcher.rank)
        size = _number(environment, launcher.size)
        if not 0 <= rank < size:
            raise MoEEpConfigError(
                f"{launcher.rank} must be 0..{launcher.size}-1, got {launcher.rank}={rank} and "
                f"{launcher.size}={size}."
            )
        local_rank = launcher.local_rank in environment
        return LaunchedProcess(
            launcher.name,
            rank,
            size,
            _number(environment, launcher.local_rank) if local_rank else None,
        )
    return None


def halves_of_launches(environment: Mapping[str, str]) -> str:
    """Return where a launcher's rank or size is there without the other one, for a message."""
    halves = [
        f"{there}={environment[there]} without {missing}"
        for launcher in _LAUNCHERS
        for there, missing in ((launcher.rank, launcher.size), (launcher.size, launcher.rank))
        if there in environment and missing not in environment
    ]
    return f", only {', '.join(halves)}" if halves else ""


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise MoEEpConfigError(f"{name} must be an integer, got {environment[name]!r}.") from None
