"""Draw sample images for calibrating vision models: no photograph is shipped, none is needed.

Every image mixes what photographs have: smooth shading, hard edges at all angles, texture over a
range of frequencies, flat areas, and colour casts. Same seed, same pixels, on any machine.
"""

import numpy as np


def draw(seed, size):
    """RGB pixels, uint8 [size, size, 3]. Seeds below 1000 calibrate, the others are held out."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:size, 0:size] / size
    image = _shading(random, x, y)
    for _ in range(random.integers(3, 9)):
        mask = _shape(random, x, y)[..., None]
        paint = _shading(random, x, y) + _texture(random, size)
        image = np.where(mask, paint, image)
    image = image + random.uniform(0, 0.3) * _texture(random, size)
    image = image * random.uniform(0.7, 1.2, 3) + random.uniform(-0.1, 0.1, 3)
    return (np.clip(image, 0, 1) * 255).round().astype(np.uint8)


def _shading(random, x, y):
    """A colour that changes slowly along one direction."""
    angle = random.uniform(0, 2 * np.pi)
    along = np.clip((x - 0.5) * np.cos(angle) + (y - 0.5) * np.sin(angle) + 0.5, 0, 1)[..., None]
    return random.uniform(0, 1, 3) * along + random.uniform(0, 1, 3) * (1 - along)


def _shape(random, x, y):
    """Where an ellipse, a half plane or a band of stripes lies."""
    centre_x, centre_y = random.uniform(0.1, 0.9, 2)
    angle = random.uniform(0, np.pi)
    u = (x - centre_x) * np.cos(angle) + (y - centre_y) * np.sin(angle)
    v = (y - centre_y) * np.cos(angle) - (x - centre_x) * np.sin(angle)
    kind = random.integers(3)
    if kind == 0:
        width, height = random.uniform(0.05, 0.4, 2)
        return (u / width) ** 2 + (v / height) ** 2 < 1
    if kind == 1:
        return u > 0
    return (np.floor(u * random.uniform(4, 40)) % 2 == 0) & (np.abs(v) < random.uniform(0.1, 0.4))


def _texture(random, size):
    """Noise whose strength falls with frequency, as in natural images; about 0.15 strong."""
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None])
    frequency[0, 0] = 1
    noise = np.fft.rfft2(random.standard_normal((size, size))) / frequency ** random.uniform(
        0.5, 1.5
    )
    noise[0, 0] = 0
    texture = np.fft.irfft2(noise, s=(size, size))
    return (0.15 * texture / texture.std())[..., None] * random.uniform(0.3, 1, 3)
