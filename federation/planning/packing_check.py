"""Which packings fit a job; checked before anything is planned."""

from __future__ import annotations

from federation.model.job import ResolvedJob
from msd_client.contract.errors import ConfigError


def check_packing(job: ResolvedJob) -> None:
    """Refuse what the rows of a job cannot be packed by.

    Carried fragments are known as a whole, not token by token, so what is trained of their parts,
    and where their media lie, is not known: jobs with masks never cut them again. Groups are not
    to be cut.

    Raises:
        ConfigError: They do not fit; the message says what does.
    """
    batch = job.batch
    if batch.packing == "concat" and batch.segment_multiple > 1:
        raise ConfigError(
            f"batch.segment_multiple {batch.segment_multiple} does not fit packing concat, "
            "which leaves no cell empty; use best_fit"
        )
    if batch.is_varlen and batch.documents == "joined":
        raise ConfigError(
            "packing varlen deals documents one by one, so none follows another: documents: joined "
            "does not fit; use separate, or packing concat"
        )
    if job.has_groups and batch.packing in ("concat", "padded"):
        raise ConfigError(
            f"packing {batch.packing} does not fit sources with group: a group needs one row of "
            "several segments; use best_fit, best_fit_even or varlen"
        )
    if not (job.has_masks or job.has_groups):
        return
    if batch.packing == "concat":
        raise ConfigError(
            "packing concat cuts samples anywhere, which does not fit masks or media; use best_fit"
        )
    values = batch.row_tokens_values
    if list(values) != sorted(values):
        raise ConfigError(
            f"batch.{batch.length_key} becomes smaller ({', '.join(map(str, values))}): carried samples "
            "with masks or media, and groups, cannot be cut again; let it grow, or start with the smallest",
            seen=min(values),
            limit=values[0],
        )
