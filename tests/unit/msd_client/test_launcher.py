"""Ranks, worlds and runs as launchers tell them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msd_client.contract.errors import MeshMismatchError
from msd_client.launcher import NUMBER_DIGITS_MAX, find_launch, find_run
from msd_client.mesh import find_place

OWN = {"MSD_RANK": "4", "MSD_WORLD_SIZE": "8", "MSD_RUN_ID": "mine"}
TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "r17", "TORCHELASTIC_RESTART_COUNT": "2",
    "MASTER_ADDR": "n1", "MASTER_PORT": "29500",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "PMIX_NAMESPACE": "prterun-n1-4711@1", "PMIX_RANK": "2",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_PROCID": "7", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_LOCALID": "3", "SLURM_NODEID": "1", "SLURM_STEP_ID": "5", "SLURM_NNODES": "3",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, ("", None, None, "")),
        (TORCHRUN, ("torchrun", 3, 6, "r17.2")),
        (OPEN_MPI, ("Open MPI", 2, 5, "prterun-n1-4711@1")),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}, ("MVAPICH", 0, 2, "")),
        (HYDRA, ("MPI", 1, 4, "")),
        (SLURM, ("Slurm", 7, 12, "77.0.5")),
        (SLURM | {"SLURM_STEP_NUM_TASKS": ""}, ("Slurm", 7, 16, "77.0.5")),
        (SLURM | {"SLURM_RESTART_COUNT": "1"}, ("Slurm", 7, 12, "77.1.5")),
    ],
)
def test_each_launcher_is_known(environ: dict[str, str], wanted: Any) -> None:
    assert find_launch(environ) == wanted


def test_the_stronger_launcher_counts_with_all_that_it_says() -> None:
    everything = SLURM | HYDRA | OPEN_MPI | TORCHRUN | OWN
    assert find_launch(everything)[1:] == (4, 8, "mine.2")
    for name in OWN:
        del everything[name]
    assert find_launch(everything) == ("torchrun", 3, 6, "r17.2")
    for name in TORCHRUN:
        del everything[name]
    assert find_launch(everything) == ("Open MPI", 2, 5, "prterun-n1-4711@1")
    # mpirun starts one helper a node by srun: its children inherit the helper's SLURM_PROCID.
    for name in OPEN_MPI:
        del everything[name]
    assert find_launch(everything) == ("MPI", 1, 4, "77.0.0")


def test_one_variable_of_ours_leaves_the_launchers_others() -> None:
    assert find_launch(TORCHRUN | {"MSD_RANK": "5"})[1:3] == (5, 6)
    assert find_launch(TORCHRUN | {"MSD_WORLD_SIZE": "4"})[1:3] == (3, 4)
    assert find_launch(TORCHRUN | {"MSD_RUN_ID": "x"})[1:] == (3, 6, "x.2")


def test_a_shell_inside_an_allocation_is_no_rank() -> None:
    shell = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "16", "SLURM_NNODES": "3"}
    assert find_launch(shell)[:3] == ("", None, None)
    assert find_place(None, None, shell) == ((("dp", 1),), 0, "77.0.0")


def test_processes_that_a_user_starts_give_their_rank_and_take_the_world() -> None:
    assert find_place(None, 1, {"WORLD_SIZE": "2"}) == ((("dp", 2),), 1, "")
    with pytest.raises(MeshMismatchError, match="does not know its own: pass rank="):
        find_place(None, None, {"WORLD_SIZE": "2"})


def test_explicit_arguments_are_stronger_than_any_launcher() -> None:
    axes = (("dp", 2), ("tp", 2))
    assert find_place(dict(axes), 1, TORCHRUN | SLURM) == (axes, 1, "r17.2")
    # RANK may be anybody's variable: where nothing is asked of it, it says nothing wrong.
    assert find_place(dict(axes), 1, {"RANK": "gold"}) == (axes, 1, "")


def test_a_mesh_that_is_not_the_launchers_world_is_refused_with_both() -> None:
    with pytest.raises(MeshMismatchError, match=r"4 ranks, the launcher \(Slurm\) started 12"):
        find_place({"dp": 4}, None, SLURM)


@pytest.mark.parametrize("text", ["x", "-1", "1.0", "²", " 3", "9" * (NUMBER_DIGITS_MAX + 1)])
@pytest.mark.parametrize("key", ["RANK", "WORLD_SIZE", "MSD_RANK", "MSD_WORLD_SIZE"])
def test_a_variable_that_is_no_number_is_named(key: str, text: str) -> None:
    with pytest.raises(MeshMismatchError, match=f"{key} is .* sets a whole number"):
        find_launch(TORCHRUN | {key: text})


def test_a_rank_outside_its_world_is_named() -> None:
    with pytest.raises(
        MeshMismatchError, match="SLURM_PROCID is 12 and SLURM_STEP_NUM_TASKS is 12"
    ):
        find_launch(SLURM | {"SLURM_PROCID": "12"})
    with pytest.raises(MeshMismatchError, match="WORLD_SIZE is 0"):
        find_launch({"RANK": "0", "WORLD_SIZE": "0"})


def test_runs_differ_by_restart_and_step_and_are_equal_across_ranks() -> None:
    assert find_run(SLURM) != find_run(SLURM | {"SLURM_RESTART_COUNT": "1"})
    assert find_run(SLURM) != find_run(SLURM | {"SLURM_STEP_ID": "6"})
    assert find_run(SLURM) == find_run(SLURM | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    # One step of srun a node, each with a torchrun: one run.
    static = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"} | SLURM
    assert find_run(static) == find_run(static | {"SLURM_STEP_ID": "6"}) == "77.0.2"
    assert find_run({"MASTER_ADDR": "n1", "MASTER_PORT": "1"}) == "n1:1"
    assert find_run({"MASTER_ADDR": "n1"}) == ""


@given(
    st.dictionaries(
        st.sampled_from(sorted({*OWN, *TORCHRUN, *OPEN_MPI, *HYDRA, *SLURM})), st.text(max_size=12)
    )
)
def test_any_environment_gives_a_launch_or_its_error(environ: dict[str, str]) -> None:
    try:
        launch = find_launch(environ)
    except MeshMismatchError:
        return
    if launch.rank is not None and launch.world is not None:
        assert 0 <= launch.rank < launch.world
    assert launch.run == find_run(environ)
