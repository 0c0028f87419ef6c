"""Step 4: gradient options are refused before a framework sees them."""

import pytest

from hvdkit import InvalidArgumentError
from hvdkit.steps.gradients import GradientOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": "mean"}, "op must be one of average, sum, adasum, got 'mean'"),
        ({"compression": "zip"}, "compression must be one of none, fp16"),
        ({"compression": "int8", "op": "adasum"}, "compression='int8' averages, and op='adasum' does not"),
        ({"compression": "auto", "op": "adasum"}, "compression='auto' averages, and op='adasum' does not"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be an integer >= 1, got 0"),
        ({"backward_passes_per_step": 1.5}, "got 1.5"),
        ({"backward_passes_per_step": True}, "got True"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor must be a finite number > 0"),
        ({"gradient_predivide_factor": 2.0, "op": "sum"}, "splits an average, but op is 'sum'"),
    ],
)
def test_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        GradientOptions(**options)


def test_accepted():
    options = GradientOptions("average", "fp16", 4, 2.0)
    assert (options.op, options.compression, options.backward_passes_per_step) == ("average", "fp16", 4)


@pytest.mark.parametrize(
    ("ranks", "all_ranks", "over_mpi", "said"),
    [(3, True, True, "power of two of them, got 3"), (2, False, True, "all ranks"), (4, True, False, "Gloo")],
)
def test_adasum_is_refused_where_horovod_cannot_do_it(ranks, all_ranks, over_mpi, said):
    with pytest.raises(InvalidArgumentError, match=said):
        GradientOptions(op="adasum").require_possible(ranks, all_ranks=all_ranks, over_mpi=over_mpi)
    GradientOptions().require_possible(ranks, all_ranks=all_ranks, over_mpi=over_mpi)
    GradientOptions(op="adasum").require_possible(4, all_ranks=True, over_mpi=True)


def test_bfloat16_is_refused_where_horovod_cannot_add_it_up():
    options = GradientOptions(compression="bf16")
    options.require_possible(2, all_ranks=True, over_mpi=True, adds_bfloat16=True)
    with pytest.raises(InvalidArgumentError, match="needs a Horovod that adds up bfloat16, over at most 64 ranks"):
        options.require_possible(65, all_ranks=True, over_mpi=True, adds_bfloat16=False)
