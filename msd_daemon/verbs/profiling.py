"""Profiles of a job's sources for verbs that work without a daemon: from the store, else probed."""

from __future__ import annotations

from collections.abc import Sequence

from federation.model.job import ResolvedJob
from federation.model.source_profile import SourceProfile, profile_fingerprint
from msd_client.contract.errors import MsdError
from msd_client.msdctl.output import say
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.sources.probe import ProbeLimits, probe_source
from msd_daemon.sources.profile_store import ProfileStore
from msd_daemon.transforms import open_tokenizer

ALL_S = 20.0
SOURCE_S_MIN = 0.02


def known_profiles(job: ResolvedJob, config: DaemonConfig) -> list[SourceProfile | None]:
    """Return what is stored of each source."""
    store = ProfileStore(config.state_dir)
    return store.load_all(profile_fingerprint(job, n) for n in range(len(job.sources)))


def limits_of(sources: int) -> ProbeLimits:
    """Return how far each of so many probes goes: all together read for ALL_S at most."""
    whole = ProbeLimits()
    return whole._replace(
        measure_s=min(whole.measure_s, max(ALL_S / max(sources, 1), SOURCE_S_MIN))
    )


def measured_profiles(
    job: ResolvedJob, config: DaemonConfig, sources: Sequence[int], *, is_anew: bool = False
) -> list[SourceProfile | None]:
    """Return a profile of each of these sources; those that are not known are probed and kept.

    A source that can't be read is told on stderr and has none.

    Args:
        job: The resolved job.
        config: The daemon's, for the state folder.
        sources: Numbers of the sources to know; others are only looked up.
        is_anew: Probe those that are known, too.

    Raises:
        ConfigError: A recipe's list, template or code is not what the job was resolved with.
    """
    found = known_profiles(job, config)
    missing = [n for n in sources if is_anew or found[n] is None]
    if not missing:
        return found
    limits = limits_of(len(missing))
    say(
        f"measuring {len(missing)} of {len(job.sources)} sources, {limits.measure_s:.2g} s each and what "
        "opening takes ..."
    )
    store, tokenizer = ProfileStore(config.state_dir), open_tokenizer(job.tokenizer)
    for number in missing:
        try:
            profile = probe_source(
                job, number, tokenizer, limits=limits, index_dir=config.state_dir / "index"
            )
        except MsdError as error:
            say(f"source {job.sources[number].name} was not measured: {error.message}")
            continue
        if profile.is_measured:
            found[number] = store.add(profile)
        else:
            say(f"source {job.sources[number].name} gave no sample of {profile.records} records")
    return found
