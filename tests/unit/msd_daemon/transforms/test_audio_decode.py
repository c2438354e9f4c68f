"""Sounds of every kind that is made here: decoders, channels, rates, windows, limits."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile

from federation.model.media import AudioRule
from msd_daemon.transforms.audio_decode import decode_audio
from msd_daemon.transforms.audio_pipeline import fit_window, prepare_samples, resample
from msd_daemon.transforms.media_error import MediaError
from tests.support.media import tone, wav

PLAIN = AudioRule()


def encode(samples: np.ndarray, rate: int, kind: str, subtype: str | None = None) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=kind, subtype=subtype)
    return out.getvalue()


@pytest.mark.parametrize(
    ("kind", "subtype", "error"),
    [
        ("WAV", "PCM_16", 1 / 32000),
        ("WAV", "PCM_U8", 1 / 100),
        ("WAV", "PCM_24", 1e-6),
        ("WAV", "FLOAT", 1e-7),
        ("FLAC", "PCM_16", 1 / 32000),
        ("AIFF", "PCM_16", 1 / 32000),
        ("AU", "PCM_16", 1 / 32000),
        ("OGG", "VORBIS", 0.05),
        ("OGG", "OPUS", 0.05),
        ("MP3", "MPEG_LAYER_III", 0.05),
    ],
)
def test_samples_come_back(kind: str, subtype: str, error: float) -> None:
    samples = tone(0.5, rate=16000)
    sound = decode_audio(encode(samples, 16000, kind, subtype), PLAIN)
    assert (sound.rate, sound.channels, sound.decoder) == (16000, 1, "libsndfile")
    assert sound.samples.dtype == np.float32
    assert len(sound.samples) == len(samples)
    middle = slice(1000, -1000)  # lossy codecs ring at the ends
    assert np.abs(sound.samples[middle] - samples[middle]).max() < error


def test_several_channels_become_one_as_the_rule_says() -> None:
    both = np.stack([tone(0.1), -0.5 * tone(0.1), 0.25 * tone(0.1)], axis=1)
    content = encode(both, 16000, "WAV", "FLOAT")
    mean = decode_audio(content, PLAIN)
    assert mean.channels == 3
    assert np.allclose(mean.samples, both.mean(axis=1), atol=1e-6)
    first = decode_audio(content, AudioRule(channels="first"))
    assert np.allclose(first.samples, both[:, 0], atol=1e-6)
    with pytest.raises(MediaError, match="has 3 channels, the job takes mono"):
        decode_audio(content, AudioRule(channels="refuse"))
    assert len(decode_audio(wav(tone(0.1)), AudioRule(channels="refuse")).samples) == 1600


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("s16le", np.array([0, 16384, -32768], "<i2").tobytes(), [0, 0.5, -1]),
        ("s32le", np.array([0, 1 << 30, -(1 << 31)], "<i4").tobytes(), [0, 0.5, -1]),
        ("f32le", np.array([0, 0.5, -1], "<f4").tobytes(), [0, 0.5, -1]),
        ("u8", bytes([128, 192, 0]), [0, 0.5, -1]),
        # ITU-T G.711: the smallest and the largest codes
        ("mulaw", bytes([0xFF, 0x80, 0x00]), [0, 32124 / 32768, -32124 / 32768]),
        ("alaw", bytes([0xD5, 0xAA, 0x2A]), [8 / 32768, 32256 / 32768, -32256 / 32768]),
    ],
)
def test_headerless_samples_are_read_as_declared(name: str, content: bytes, wanted: list) -> None:
    sound = decode_audio(content, AudioRule(raw_format=name, raw_rate=8000))
    assert (sound.rate, sound.channels, sound.decoder) == (8000, 1, "raw")
    assert np.allclose(sound.samples, wanted, atol=1e-7)


def test_g711_is_what_libsndfile_makes_of_every_code() -> None:
    every = bytes(range(256))
    for name, subtype in (("mulaw", "ULAW"), ("alaw", "ALAW")):
        wanted, _ = soundfile.read(
            io.BytesIO(every), samplerate=8000, channels=1, format="RAW", subtype=subtype
        )
        found = decode_audio(every, AudioRule(raw_format=name, raw_rate=8000)).samples
        assert np.array_equal(found, wanted.astype(np.float32))


def test_headerless_samples_that_are_cut_are_refused() -> None:
    with pytest.raises(MediaError, match="the last sample is cut"):
        decode_audio(b"\0" * 5, AudioRule(raw_format="s16le", raw_rate=8000))
    with pytest.raises(MediaError, match="the last of its 2 channels is cut"):
        decode_audio(b"\0" * 6, AudioRule(raw_format="s16le", raw_rate=8000, raw_channels=2))


@pytest.mark.parametrize("content", [b"", b"RIFF", b"fLaC", b"no sound at all", b"\0" * 5000])
def test_what_is_no_sound_is_refused(content: bytes) -> None:
    with pytest.raises(MediaError, match=f"sound of {len(content)} bytes"):
        decode_audio(content, PLAIN)


@pytest.mark.parametrize(
    "text", [b"#EXTM3U\nfile:///etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n"]
)
def test_lists_of_other_files_are_no_sounds(text: bytes) -> None:
    with pytest.raises(MediaError, match="cannot be decoded"):
        decode_audio(text, PLAIN)


def test_a_sound_without_samples_has_none() -> None:
    assert len(decode_audio(wav(np.zeros(0)), PLAIN).samples) == 0


def test_limits_are_told_with_their_keys() -> None:
    content = wav(tone(2.0))
    with pytest.raises(MediaError, match=r"seconds: more than 1.5, the limit is 1.5") as error:
        decode_audio(content, AudioRule(seconds_max=1.5))
    assert "decode.max_seconds" in error.value.message
    with pytest.raises(MediaError, match=r"the limit is 31999") as error:
        decode_audio(content, AudioRule(samples_max=31999))
    assert "decode.max_samples" in error.value.message
    assert len(decode_audio(content, AudioRule(samples_max=32000, seconds_max=2)).samples) == 32000


def test_a_header_that_claims_too_much_gives_what_is_there() -> None:
    content = bytearray(wav(tone(0.25)))
    content[4:8] = content[40:44] = b"\xff\xff\xff\xff"  # as an encoder that streams
    assert len(decode_audio(bytes(content), PLAIN).samples) == 4000


def test_samples_that_are_no_numbers_are_refused() -> None:
    content = np.array([0, np.nan, 1], "<f4").tobytes()
    with pytest.raises(MediaError, match="no numbers"):
        decode_audio(content, AudioRule(raw_format="f32le", raw_rate=8000))


@pytest.mark.parametrize(("rate", "wanted"), [(44100, 16000), (8000, 16000), (35467, 16000)])
def test_resampling_keeps_a_tone_and_its_length(rate: int, wanted: int) -> None:
    samples = tone(1.0, 1000.0, rate).astype(np.float32)
    found = resample(samples, rate, wanted)
    assert len(found) == wanted
    middle = slice(500, -500)
    error = found[middle] - tone(1.0, 1000.0, wanted)[middle]
    assert 10 * np.log10((error**2).mean() / 0.125) < -90


def test_resampling_leaves_nothing_above_half_the_rate() -> None:
    found = resample(tone(1.0, 9000.0, 44100).astype(np.float32), 44100, 16000)[500:-500]
    assert np.abs(found).max() < 1e-4


def test_resampling_agrees_with_ffmpeg() -> None:
    import av

    samples = tone(1.0, 1000.0, 44100).astype(np.float32)
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=16000)
    frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
    frame.sample_rate = 44100
    parts = [*resampler.resample(frame), *resampler.resample(None)]
    theirs = np.concatenate([part.to_ndarray()[0] for part in parts])
    ours = resample(samples, 44100, 16000)
    assert len(ours) == len(theirs)
    assert np.abs(ours - theirs)[500:-500].max() < 1e-4


@pytest.mark.parametrize(
    ("mode", "short", "long"),
    [("cut", 0.5, 1.0), ("pad", 1.0, 2.0), ("fit", 1.0, 1.0)],
)
def test_windows(mode: str, short: float, long: float) -> None:
    rule = AudioRule(window_s=1.0, window=mode)
    for seconds, wanted in ((0.5, short), (2.0, long)):
        samples = tone(seconds).astype(np.float32)
        found = fit_window(samples, 16000, rule)
        assert len(found) == wanted * 16000
        kept = min(len(samples), len(found))
        assert np.array_equal(found[:kept], samples[:kept])
        assert not found[kept:].any()


def test_a_long_sound_is_resampled_only_as_far_as_its_window() -> None:
    samples = tone(4.0, 1000.0, 44100)
    whole, rate = prepare_samples(wav(samples, 44100), AudioRule(rate=16000))
    cut, _ = prepare_samples(wav(samples, 44100), AudioRule(rate=16000, window_s=1.0))
    assert (len(whole), len(cut), rate) == (64000, 16000, 16000)
    assert np.abs(whole[:16000] - cut).max() < 1e-6
    # A limit on what is decoded does not meet what lies behind the window.
    short = AudioRule(rate=16000, window_s=1.0, window="fit", seconds_max=3.0)
    assert len(prepare_samples(wav(samples, 44100), short)[0]) == 16000


def test_a_window_can_refuse() -> None:
    rule = AudioRule(rate=8000, window_s=1.0, window="refuse")
    assert len(prepare_samples(wav(tone(1.0)), rule)[0]) == 8000
    with pytest.raises(MediaError, match=r"sound, seconds: 1\.25, the limit is 1;"):
        prepare_samples(wav(tone(1.25)), rule)
