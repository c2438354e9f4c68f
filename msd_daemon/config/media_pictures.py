"""Resolves the steps that images and videos share: the size of pictures, and their patches."""

from __future__ import annotations

from federation.model.media import PatchRule, ResizeRule, UnitDtype
from msd_client.contract.media_fields import Modality
from msd_daemon.config.faults import MISSING, Fault
from msd_daemon.config.media_steps import Patchify, Resize

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
NATIVE_PIXELS_MIN, NATIVE_PIXELS_MAX = 56 * 56, 28 * 28 * 1280
"""Qwen2-VL's processor's own limits."""


def resolve_patches(
    modality: Modality, step: Patchify | None, faults: list[Fault]
) -> tuple[PatchRule, UnitDtype]:
    """Return how pixels become patches, and the type of their values."""
    if step is None:
        return PatchRule(), "uint8"
    is_qwen = step.patchify == "qwen2_vl"
    rule = PatchRule(
        layout=step.patchify,
        patch=step.patch or (14 if is_qwen else 16),
        temporal=step.temporal or (2 if is_qwen else 1),
        merge=step.merge or (2 if is_qwen else 1),
        mean=tuple(step.mean or (CLIP_MEAN if is_qwen else (0.5, 0.5, 0.5))),
        std=tuple(step.std or (CLIP_STD if is_qwen else (0.5, 0.5, 0.5))),
    )
    if step.dtype == "uint8" and (step.mean or step.std):
        problem, remedy = "uint8 patches are not normalised", "write dtype: float32, or remove both"
        faults.append(Fault(f"{modality}.patchify.mean", step.dtype, problem, remedy))
    return rule, step.dtype


def resolve_resize(
    modality: Modality, step: Resize | None, patches: PatchRule, faults: list[Fault]
) -> ResizeRule:
    """Return the size that pictures get; their sides divide into patches."""
    path, step = f"{modality}.resize", step or Resize(resize="none")
    _check_keys(path, step, faults)
    side = step.side or 0
    multiple = step.multiple or patches.side
    is_native = step.resize == "native"
    rule = ResizeRule(
        policy=step.resize,
        height=step.height or 0,
        width=step.width or 0,
        side=side,
        crop=step.crop,
        multiple=multiple,
        pixels_min=step.min_pixels or (NATIVE_PIXELS_MIN if is_native else 0),
        pixels_max=step.max_pixels or (NATIVE_PIXELS_MAX if is_native else 0),
        filter=step.filter,
    )
    if multiple % patches.side:
        problem = f"is no multiple of patch * merge, {patches.side}"
        faults.append(Fault(f"{path}.multiple", multiple, problem, f"write {patches.side}"))
    sides = [rule.height, rule.width] if step.resize == "fixed" else [0]
    sides += [side] if step.crop != "none" else []
    for pixels in sides:
        if pixels % patches.side:
            problem = f"does not divide into patches of {patches.side} pixels"
            faults.append(Fault(path, pixels, problem, f"write a multiple of {patches.side}"))
    if rule.pixels_max and rule.pixels_min > rule.pixels_max:
        faults.append(
            Fault(f"{path}.min_pixels", rule.pixels_min, "is over max_pixels", "lower it")
        )
    return rule


def check_row(
    modality: Modality,
    rule: ResizeRule,
    patches: PatchRule,
    groups: int,
    limit: int | None,
    faults: list[Fault],
) -> None:
    """Refuse a job whose largest items fit no row: it would lose them all, one by one.

    Args:
        modality: Of the items.
        rule: Size of a picture.
        patches: Of it.
        groups: Frame groups of an item.
        limit: Patches of a row; None where the job does not say.
        faults: Receives what is wrong.
    """
    pixels = rule.height * rule.width if rule.policy == "fixed" else rule.pixels_max
    units = groups * (pixels // patches.patch**2)
    if limit is not None and units > limit:
        problem = f"the largest {modality} takes more patches than the {limit} of a row"
        remedy = "lower its size, or raise batch.microbatch_patches"
        faults.append(Fault(f"{modality}.resize", f"{units} patches", problem, remedy))


def _check_keys(path: str, step: Resize, faults: list[Fault]) -> None:
    needed = {
        "fixed": {"height", "width"},
        "short_side": {"side"},
        "max_pixels": {"max_pixels"},
    }.get(step.resize, set())
    allowed = needed | {"resize", "filter"}
    allowed |= {"crop"} if step.resize == "short_side" else set()
    allowed |= set() if step.resize in ("none", "fixed") else {"multiple"}
    allowed |= {"min_pixels", "max_pixels"} if step.resize == "native" else set()
    given = step.model_fields_set
    problem = f"resize {step.resize} needs it"
    faults += [Fault(f"{path}.{key}", MISSING, problem, "add it") for key in sorted(needed - given)]
    for key in sorted(given - allowed):
        problem = f"is no key of resize {step.resize}"
        faults.append(Fault(f"{path}.{key}", getattr(step, key), problem, "remove it"))
