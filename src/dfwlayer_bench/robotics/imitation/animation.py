"""A robot in motion with a bar of the power it uses, as an animated picture."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dfwlayer_bench.robotics.files import writing
from dfwlayer_bench.robotics.imitation.evaluate import FRESH_SEED, Act
from dfwlayer_bench.robotics.tasks import Task, make_env, power

__all__ = ["Scene", "film", "record", "save_animation"]

SIZE = (320, 240)  # width and height of a frame from the simulator
BAR = 48  # height of the strip with the power
STRIDE = 2  # simulator steps in a frame
COLOURS = 48  # of the palette
INK, GOOD, BAD, PAPER = (30, 36, 48), (0, 114, 178), (213, 94, 0), (255, 255, 255)
ROOM = 1.5  # what the bar shows at most, in units of the limit
# how much a picture is enlarged, and where the part shown lies between its top, 0, and bottom, 1
FRAMING = {"ReacherBulletEnv-v0": (5.0, 0.5)}  # its camera stands far away
LOW = (1.0, 1.0)  # a robot runs at the bottom
# colours of a MuJoCo model: the robot's, from 0 to 1, greys of the floor's tiles, and the sky's
BODY, TILES, SKY = (0.18, 0.33, 0.55), (204, 238), 250
SKYBOX = 2  # MuJoCo's number of that kind of texture


@dataclass(frozen=True)
class Scene:
    """A part of an episode."""

    frames: list[NDArray[np.uint8]]  # (height, width, 3) each
    powers: list[float]  # largest since the frame before
    violations: int
    episode_return: float


def record(task: Task, act: Act, steps: int, seed: int = FRESH_SEED) -> Scene:
    """Roll out one policy and take pictures; raises where the simulator cannot draw.

    MuJoCo draws without a window through EGL unless MUJOCO_GL says otherwise.
    """
    os.environ.setdefault("MUJOCO_GL", "egl")
    env = make_env(task, seed, render_mode="rgb_array")
    try:
        renderer = getattr(env.unwrapped, "mujoco_renderer", None)
        if renderer is not None:
            renderer.camera_id = 0  # the model's own camera, which moves with the robot
            _lighten(env.unwrapped)
        observation, _ = env.reset(seed=seed)
        frames: list[NDArray[np.uint8]] = []
        powers: list[float] = []
        recent, total, violations = 0.0, 0.0, 0
        for step in range(steps):
            action = act(observation[None])[0]
            used = float(power(task, observation, action))
            violations += used > task.limit
            recent = max(recent, used)
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            if step % STRIDE == STRIDE - 1:
                picture: Any = env.render()
                frames.append(np.asarray(picture, dtype=np.uint8))
                powers.append(recent)
                recent = 0.0
            if terminated or truncated:
                break
    finally:
        env.close()
    return Scene(frames, powers, violations, total)


def _lighten(robot: Any) -> None:
    """Paint a MuJoCo model before it is first drawn: bright, and a floor without an end.

    Its own floor of black and white ends after 40 m, which a cheetah has run in six seconds.
    """
    model = robot.model
    floor = model.geom("floor")
    (material,) = floor.matid
    model.mat_texrepeat[material] /= 2.0 * model.geom_size[floor.id, :2]  # tiles in a metre
    model.geom_size[floor.id, :2] = 0.0  # endless
    model.geom_rgba[model.geom_bodyid > 0] = (*BODY, 1.0)
    model.mat_reflectance[:] = 0.0
    (texture,) = (int(t) for t in model.mat_texid[material] if t >= 0)
    for number in range(model.ntex):
        start = model.tex_adr[number]
        count = 3 * model.tex_height[number] * model.tex_width[number]
        data = model.tex_data[start : start + count]
        if number == texture:
            data[:] = np.where(data.reshape(-1, 3).mean(-1) < 128, *TILES).repeat(3)
        elif model.tex_type[number] == SKYBOX:
            data[:] = SKY


def film(task: Task, scenes: Mapping[str, Scene]) -> list[Any]:
    """Frames with a bar below, as pictures of Pillow's; scenes of policies stand side by side."""
    from PIL import Image

    width, height = SIZE
    length = min(len(scene.frames) for scene in scenes.values())
    pictures = []
    for number in range(length):
        page = Image.new("RGB", (width * len(scenes), height + BAR), PAPER)
        for place, (title, scene) in enumerate(scenes.items()):
            frame = _cut(Image.fromarray(scene.frames[number]), *FRAMING.get(task.env_id, LOW))
            page.paste(frame, (place * width, 0))
            _draw_bar(page, place * width, scene.powers[number], task.limit, title)
        pictures.append(page)
    return pictures


def _cut(frame: Any, zoom: float, height_at: float) -> Any:
    """A part of a frame, enlarged, in the shape of the others."""
    width, height = SIZE
    scale = zoom * max(width / frame.width, height / frame.height)
    left = (frame.width - width / scale) / 2
    top = (frame.height - height / scale) * height_at
    return frame.resize(SIZE, box=(left, top, frame.width - left, top + height / scale))


def _draw_bar(page: Any, offset: int, used: float, limit: float, title: str) -> None:
    from PIL import ImageDraw, ImageFont

    draw = ImageDraw.Draw(page)
    width, height = SIZE
    left, right, top = offset + 8, offset + width - 8, height + 24
    unit = (right - left) / ROOM
    end = left + min(used / limit, ROOM) * unit
    draw.rectangle((left, top, end, top + 16), fill=BAD if used > limit else GOOD)
    draw.rectangle((left, top, right, top + 16), outline=INK)
    draw.line((left + unit, top - 3, left + unit, top + 19), fill=INK, width=3)
    text = f"{title}: power {used:.{1 if limit >= 10 else 2}f}, limit {limit:g}"
    draw.text((left, height + 4), text, fill=INK, font=ImageFont.load_default(14))


def save_animation(path: Path, pictures: list[Any], milliseconds: int) -> Path:
    """Write an animated GIF with one palette for all frames, so that nothing flickers."""
    from PIL import Image

    sample = Image.new("RGB", (pictures[0].width, 4 * pictures[0].height))
    for place, number in enumerate(np.linspace(0, len(pictures) - 1, 4).astype(int)):
        sample.paste(pictures[number], (0, place * pictures[0].height))
    palette = sample.quantize(COLOURS)
    plain = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    with writing(path) as draft:
        plain[0].save(
            draft,
            format="GIF",
            save_all=True,
            append_images=plain[1:],
            duration=milliseconds,
            loop=0,
            optimize=False,
        )
    return path
