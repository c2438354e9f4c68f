"""Resolves `image:`, `video:` and `audio:` into the rules that decoders follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from federation.model.media import (
    AudioRule,
    ImageRule,
    MediaRule,
    MelRule,
    UnitDtype,
    VideoRule,
)
from federation.model.recipe import UserCall
from msd_client.contract.media_fields import Modality
from msd_daemon.config.faults import MISSING, Fault
from msd_daemon.config.media_pictures import check_row, resolve_patches, resolve_resize
from msd_daemon.config.media_placeholder import MediaIds, TokenIdOf, resolve_ids
from msd_daemon.config.media_steps import (
    AudioDecodeFile,
    AudioSteps,
    Call,
    DecodeAudio,
    DecodeImage,
    DecodeVideo,
    Frames,
    ImageDecodeFile,
    ImageSteps,
    Mel,
    Patchify,
    Placeholders,
    Resample,
    Resize,
    SampleFrames,
    VideoDecodeFile,
    VideoSteps,
    Window,
)
from msd_daemon.config.section import Section
from msd_daemon.transforms.audio_mel import mel_samples

StepOf = Callable[[str, Call], UserCall | None]
Step = TypeVar("Step", bound=Section)
Order = tuple[type[Section] | tuple[type[Section], ...], ...]

_IMAGE_ORDER: Order = (DecodeImage, Resize, Call, Patchify)
_VIDEO_ORDER: Order = (DecodeVideo, SampleFrames, Resize, Call, Patchify)
_AUDIO_ORDER: Order = (DecodeAudio, Resample, Window, Call, (Mel, Frames))


class MediaSections(Protocol):
    """The keys of a job file that are about media."""

    @property
    def image(self) -> ImageSteps | None: ...
    @property
    def video(self) -> VideoSteps | None: ...
    @property
    def audio(self) -> AudioSteps | None: ...
    @property
    def placeholder(self) -> Placeholders: ...


def resolve_media(
    file: MediaSections,
    used: frozenset[Modality],
    token_id_of: TokenIdOf,
    row_units: Mapping[Modality, int],
    step_of: StepOf,
    faults: list[Fault],
    known_ids: Mapping[Modality, MediaIds] | None = None,
    broken: frozenset[str] = frozenset(),
) -> tuple[MediaRule, ...]:
    """Return one rule for each modality that sources have, in the order of MODALITIES.

    Args:
        file: The job.
        used: Modalities that its sources have.
        token_id_of: Gives the id of a token or id; None where the tokenizer has it not.
        row_units: Most patches (frames) of a row by modality.
        step_of: Copies the user's code of a (key path, step), and says where it lies.
        faults: Receives what is wrong.
        known_ids: What the model's own configuration names, where `placeholder` names none.
        broken: Sections that are absent from `file` for a fault that was told.
    """
    found = _Resolver(file, token_id_of, row_units, step_of, faults, known_ids or {})
    makers: dict[Modality, Callable[[], MediaRule | None]] = {
        "image": found.image,
        "video": found.video,
        "audio": found.audio,
    }
    rules = []
    for modality, make in makers.items():
        rule, steps = make(), getattr(file, modality)
        if modality in used and rule is not None:
            rules.append(rule)
        elif modality in used and modality not in broken:
            problem = f"sources have it, and no steps say what becomes of an item of {modality}"
            faults.append(
                Fault(modality, MISSING, problem, "add steps, with the last one at least")
            )
        elif steps is not None:
            problem, remedy = (
                "no source has it",
                f"name its field in a source, or remove {modality}",
            )
            faults.append(Fault(modality, f"{len(steps)} steps", problem, remedy))
    for modality in file.placeholder:
        if modality not in used:
            problem = "no source has it"
            faults.append(Fault(f"placeholder.{modality}", modality, problem, "remove it"))
    return tuple(rules)


@dataclass
class _Resolver:
    file: MediaSections
    token_id_of: TokenIdOf
    row_units: Mapping[Modality, int]
    step_of: StepOf
    faults: list[Fault]
    known_ids: Mapping[Modality, MediaIds] = field(default_factory=dict)

    def image(self) -> MediaRule | None:
        steps = self.file.image
        if steps is None:
            return None
        self._check_order("image", steps, _IMAGE_ORDER)
        given = _first(steps, DecodeImage)
        decode = given.decode if given else ImageDecodeFile()
        patches, dtype = resolve_patches("image", _first(steps, Patchify), self.faults)
        resize = resolve_resize("image", _first(steps, Resize), patches, self.faults)
        check_row("image", resize, patches, 1, self.row_units.get("image"), self.faults)
        rule = ImageRule(
            pixels_max=decode.max_pixels,
            background=tuple(decode.background),
            draft_gap=decode.draft_gap,
            resize=resize,
            patches=patches,
        )
        return self._rule("image", steps, patches.values, dtype, image=rule)

    def video(self) -> MediaRule | None:
        steps = self.file.video
        if steps is None:
            return None
        self._check_order("video", steps, _VIDEO_ORDER)
        given = _first(steps, DecodeVideo)
        decode = given.decode if given else VideoDecodeFile()
        sample = _first(steps, SampleFrames) or SampleFrames()
        self._check_sample(sample)
        patches, dtype = resolve_patches("video", _first(steps, Patchify), self.faults)
        resize = resolve_resize("video", _first(steps, Resize), patches, self.faults)
        if sample.sample == "count" and sample.count:  # else most have fewer frames than the most
            groups = -(-sample.count // patches.temporal)
            check_row("video", resize, patches, groups, self.row_units.get("video"), self.faults)
        rule = VideoRule(
            sample=sample.sample,
            fps=sample.fps or 2.0,
            count=sample.count or 0,
            frames_max=sample.max_frames,
            seconds_max=decode.max_seconds,
            source_frames_max=decode.max_source_frames,
            pixels_max=decode.max_pixels,
            resize=resize,
            patches=patches,
        )
        return self._rule("video", steps, patches.values, dtype, video=rule)

    def audio(self) -> MediaRule | None:
        steps = self.file.audio
        if steps is None:
            return None
        self._check_order("audio", steps, _AUDIO_ORDER)
        given = _first(steps, DecodeAudio)
        decode = given.decode if given else AudioDecodeFile()
        resample, window = _first(steps, Resample), _first(steps, Window)
        mel, frames, raw = _first(steps, Mel), _first(steps, Frames), decode.raw
        rule = AudioRule(
            raw_format=raw.format if raw else "",
            raw_rate=raw.rate if raw else 0,
            raw_channels=raw.channels if raw else 1,
            channels=decode.channels,
            rate=resample.resample if resample else 0,
            seconds_max=decode.max_seconds,
            samples_max=decode.max_samples,
            window_s=window.window if window else 0.0,
            window=window.mode if window else "cut",
            mel=self._mel(mel, resample) if mel else None,
            frame_samples=frames.frames.samples if frames else 0,
        )
        last = mel.mel if mel else frames.frames if frames else None
        values = rule.mel.bins if rule.mel else rule.frame_samples
        return self._rule("audio", steps, values, last.dtype if last else "float32", audio=rule)

    def _mel(self, step: Mel, resample: Resample | None) -> MelRule:
        mel = step.mel
        rule = MelRule(
            bins=mel.bins,
            hop_ms=mel.hop_ms,
            window_ms=mel.window_ms,
            fft=mel.fft or 0,
            hertz_min=mel.fmin,
            hertz_max=mel.fmax or 0.0,
            scale=mel.scale,
            log=mel.log,
        )
        if resample is None:
            self._fault("audio", MISSING, "mel needs one rate", "put {resample: 16000} before it")
            return rule
        half, window = resample.resample / 2, mel_samples(rule, resample.resample)[1]
        highest = mel.fmax or half
        if not mel.fmin < highest <= half:
            remedy = f"write fmin below fmax, and fmax of at most {half:g}"
            seen = f"{mel.fmin:g} to {highest:g} Hz"
            self._fault("audio.mel.fmax", seen, "is no range of this rate", remedy)
        if mel.fft and mel.fft < window:
            problem = f"is shorter than the window's {window} samples"
            self._fault("audio.mel.fft", mel.fft, problem, f"write at least {window}")
        return rule

    def _check_sample(self, step: SampleFrames) -> None:
        if step.sample == "count" and step.count is None:
            self._fault("video.sample.count", MISSING, "sample count needs it", "add it")
        for key in ("fps", "count"):
            value = getattr(step, key)
            if value is not None and step.sample != key:
                problem = f"is no key of sample {step.sample}"
                self._fault(f"video.sample.{key}", value, problem, "remove it")

    def _rule(
        self,
        name: Modality,
        steps: Sequence[Section],
        values: int,
        dtype: UnitDtype,
        *,
        image: ImageRule | None = None,
        audio: AudioRule | None = None,
        video: VideoRule | None = None,
    ) -> MediaRule:
        given = self.file.placeholder.get(name)
        ids = resolve_ids(name, given, self.token_id_of, self.known_ids, self.faults)
        limit, key = self.row_units.get(name), "frames" if name == "audio" else "patches"
        if limit is None:
            problem = f"a job with {name} has to say how many {key} a microbatch holds"
            self._fault(f"batch.microbatch_{key}", MISSING, problem, "add it")
        call = _first(steps, Call)
        return MediaRule(
            modality=name,
            unit_values=values,
            unit_dtype=dtype,
            row_units_max=limit or 1,
            placeholder_id=ids.placeholder,
            begin_id=ids.begin,
            end_id=ids.end,
            placeholder_tokens=(given.tokens or "") if given else "",
            image=image,
            audio=audio,
            video=video,
            step=None if call is None else self.step_of(f"{name}.call", call),
        )

    def _check_order(self, name: Modality, steps: Sequence[Section], order: Order) -> None:
        places = [next(i for i, kind in enumerate(order) if isinstance(s, kind)) for s in steps]
        shown = ", ".join(map(_step_name, order))
        for at in range(1, len(places)):
            if places[at] <= places[at - 1]:
                problem = "stands twice" if places[at] == places[at - 1] else "stands too late"
                seen = _step_name(type(steps[at]))
                self._fault(f"{name}[{at}]", seen, problem, f"the order is: {shown}")
        if len(order) - 1 not in places:
            problem = f"there is no {_step_name(order[-1])} step"
            self._fault(name, MISSING, problem, "add it as the last one")

    def _fault(self, path: str, value: object, problem: str, remedy: str) -> None:
        self.faults.append(Fault(path, value, problem, remedy))


def _first(steps: Sequence[Section], kind: type[Step]) -> Step | None:
    return next((step for step in steps if isinstance(step, kind)), None)


def _step_name(kind: type[Section] | tuple[type[Section], ...]) -> str:
    if isinstance(kind, tuple):
        return " or ".join(map(_step_name, kind))
    return next(iter(kind.model_fields))
