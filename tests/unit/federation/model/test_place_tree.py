import pytest

from federation.model.job import BatchRule
from federation.model.place_tree import ClientPlaceTree
from msd_client.contract.errors import MeshMismatchError, NotFoundError


def test_ranks_are_row_major_with_the_last_axis_fastest():
    tree = ClientPlaceTree.from_mesh({"dp": 2, "tp": 2})
    assert tree.rank_count == 4
    assert [tree.coordinate(rank) for rank in range(4)] == [
        {"dp": 0, "tp": 0},
        {"dp": 0, "tp": 1},
        {"dp": 1, "tp": 0},
        {"dp": 1, "tp": 1},
    ]
    assert [tree.dp_group(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert tree.ranks_of_dp_group(1) == (2, 3)


def test_axes_come_in_any_order():
    tree = ClientPlaceTree.from_mesh({"tp": 2, "dp": 3})
    assert [tree.dp_group(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert tree.ranks_of_dp_group(2) == (2, 5)


def test_replicated_and_sharded_dp_make_one_group_number():
    tree = ClientPlaceTree.from_mesh({"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 2})
    assert tree.dp_count == 6
    groups = [tree.ranks_of_dp_group(group) for group in range(6)]
    assert sorted(rank for group in groups for rank in group) == list(range(24))
    assert all(len(group) == 4 for group in groups)
    assert tree.dp_group(2 * (1 * 3 + 2)) == 5


def test_an_empty_mesh_is_one_rank():
    tree = ClientPlaceTree.from_mesh({})
    assert (tree.rank_count, tree.dp_count, tree.dp_group(0), tree.describe()) == (
        1,
        1,
        0,
        "1 rank",
    )


def test_first_ranks_of_an_axis_read_for_their_peers():
    tree = ClientPlaceTree.from_mesh({"dp": 2, "tp": 3})
    assert tree.first_ranks("tp") == (0, 3)
    with pytest.raises(MeshMismatchError, match="no axis 'cp'"):
        tree.first_ranks("cp")


def test_nodes_of_a_group():
    tree = ClientPlaceTree.from_mesh({"tp": 2, "dp": 2}, nodes=[0, 0, 1, 1])
    assert tree.nodes_of_dp_group(0) == (0, 1)
    assert ClientPlaceTree.from_mesh({"dp": 2}).nodes_of_dp_group(1) == (0,)


@pytest.mark.parametrize("mesh", [{"dq": 2}, {"dp": 0}, {"dp": -1}, {"dp": 1.5}, {"dp": True}])
def test_impossible_meshes_are_refused(mesh):
    with pytest.raises(MeshMismatchError, match=next(iter(mesh))):
        ClientPlaceTree.from_mesh(mesh)


def test_a_node_list_of_another_length_is_refused():
    with pytest.raises(MeshMismatchError, match="3 nodes are named for 2 ranks"):
        ClientPlaceTree.from_mesh({"dp": 2}, nodes=[0, 0, 1])


def test_rows_that_do_not_divide_are_refused_with_the_nearest_dp():
    tree = ClientPlaceTree.from_mesh({"dp": 3})
    with pytest.raises(MeshMismatchError, match=r"16 .* dp 3 \* microbatch_rows 2 = 6.*dp 1, 2, 4"):
        tree.microbatch_count(BatchRule(16, 8, microbatch_rows=2))
    with pytest.raises(MeshMismatchError, match="no dp fits"):
        tree.microbatch_count(BatchRule(7, 8, microbatch_rows=8))


def test_microbatch_count():
    assert ClientPlaceTree.from_mesh({"dp": 4, "tp": 2}).microbatch_count(BatchRule(32, 8, 2)) == 4


def test_unknown_ranks_and_groups_are_named():
    tree = ClientPlaceTree.from_mesh({"dp": 2})
    with pytest.raises(NotFoundError, match="rank 2"):
        tree.coordinate(2)
    with pytest.raises(NotFoundError, match="group 2"):
        tree.ranks_of_dp_group(2)
