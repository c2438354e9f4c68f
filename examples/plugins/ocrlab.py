"""A transform of one's own: `transform: {call: "ocrlab:clean", options: {drop: 0.1}}`."""


def clean(sample, rng, drop=0.0):
    """Leave out what has no text, and drop words at random; a long text becomes two samples."""
    words = [word for word in sample["text"].split() if rng.random() >= drop]
    if not words:
        return None
    if len(words) <= 1000:
        return {**sample, "text": " ".join(words)}
    half = len(words) // 2
    return [{**sample, "text": " ".join(part)} for part in (words[:half], words[half:])]


def jitter(pixels, rng):
    """As a step of `image`: uint8 [height, width, 3], a little brighter or darker."""
    return (pixels * rng.uniform(0.8, 1.2)).clip(0, 255).astype("uint8")
