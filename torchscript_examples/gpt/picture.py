# SPDX-License-Identifier: BSD-3-Clause
"""A loss-curve picture as SVG and PNG, with nothing but Python's standard library.

A drawing is a list of lines, dots and texts; one list is written in both formats. The PNG's letters are strokes (capitals).
"""

import math
import struct
import zlib
from html import escape

INK, FAINT, GRID = (40, 44, 52), (120, 124, 132), (226, 228, 232)
BOLD, POINT = (31, 90, 168), (205, 72, 45)

# Strokes on a grid of x 0..4, y 0 (top) .. 6 (baseline); each word is one polyline of xy pairs.
GLYPHS = {
    "0": "011030414536160501", "1": "112026 1636", "2": "01103041420646", "3": "0110304142334445361605 1333",
    "4": "36300444", "5": "400002324345361605", "6": "4130100105163645443303", "7": "004016",
    "8": "13020110304142331304051636454433", "9": "0516364541301001021343", ".": "2526", ",": "2617", ":": "2122 2526",
    "-": "1333", "/": "0640", "(": "30212536", ")": "10212516", "A": "062046 1434", "B": "00063645443303 0030414233",
    "C": "4130100105163645", "D": "00062644422000", "E": "40000646 0333", "F": "400006 0333", "G": "41301001051636454323",
    "H": "0006 4046 0343", "I": "1030 2026 1636", "J": "4045361605", "K": "0006 400346", "L": "000646", "M": "0600234046",
    "N": "06004640", "O": "011030414536160501", "P": "06003041423303", "Q": "011030414536160501 2446",
    "R": "06003041423303 2346", "S": "413010010213334445361605", "T": "0040 2026", "U": "000516364540", "V": "002640",
    "W": "0016233640", "X": "0046 4006", "Y": "002340 2326", "Z": "00400646",
}
ADVANCE = 5.6


class Drawing:
    def __init__(self, width, height):
        self.width, self.height, self.items = width, height, []

    def line(self, points, colour, width=1.0):
        self.items.append(("line", list(points), colour, width))

    def dot(self, x, y, radius, colour):
        self.items.append(("dot", (x, y), colour, radius))

    def text(self, x, y, words, size=12, anchor="start", colour=INK):
        """(x, y) is the baseline's start, middle or end."""
        self.items.append(("text", (x, y), colour, (words, size, anchor)))

    def svg(self):
        parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
                 f'viewBox="0 0 {self.width} {self.height}"><rect width="100%" height="100%" fill="white"/>']
        for kind, where, colour, detail in self.items:
            rgb = "#%02x%02x%02x" % colour
            if kind == "line":
                points = " ".join(f"{x:.1f},{y:.1f}" for x, y in where)
                parts.append(f'<polyline points="{points}" fill="none" stroke="{rgb}" stroke-width="{detail}" '
                             'stroke-linejoin="round" stroke-linecap="round"/>')
            elif kind == "dot":
                parts.append(f'<circle cx="{where[0]:.1f}" cy="{where[1]:.1f}" r="{detail}" fill="{rgb}"/>')
            else:
                words, size, anchor = detail
                parts.append(f'<text x="{where[0]:.1f}" y="{where[1]:.1f}" font-family="sans-serif" font-size="{size}" '
                             f'text-anchor="{anchor}" fill="{rgb}">{escape(words)}</text>')
        return "\n".join(parts) + "\n</svg>\n"

    def png(self):
        pixels = bytearray(b"\xff" * (3 * self.width * self.height))
        for kind, where, colour, detail in self.items:
            if kind == "line":
                self._stroke(pixels, where, colour, detail)
            elif kind == "dot":
                self._segment(pixels, where, where, colour, 2 * detail)
            else:
                self._write(pixels, where, colour, detail)
        row = 3 * self.width
        raw = b"".join(b"\0" + bytes(pixels[y * row:(y + 1) * row]) for y in range(self.height))
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, body) for kind, body in (
            (b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b"")))

    def _stroke(self, pixels, points, colour, width):
        for a, b in zip(points, points[1:]):
            self._segment(pixels, a, b, colour, width)

    def _write(self, pixels, where, colour, detail):
        words, size, anchor = detail
        unit = size * 0.72 / 6  # capitals are 0.72 of the size tall
        length = unit * (ADVANCE * len(words) - 1.6)
        x = where[0] - {"start": 0, "middle": length / 2, "end": length}[anchor]
        for letter in words.upper():
            for path in GLYPHS.get(letter, "").split():
                points = [(x + unit * int(path[i]), where[1] + unit * (int(path[i + 1]) - 6)) for i in range(0, len(path), 2)]
                self._stroke(pixels, points, colour, max(1.0, size / 11))
            x += unit * ADVANCE

    def _segment(self, pixels, a, b, colour, width):
        """Covers each pixel by its distance to the segment, so that edges are smooth."""
        (ax, ay), (bx, by) = a, b
        reach, dx, dy = width / 2 + 0.5, bx - ax, by - ay
        square = dx * dx + dy * dy
        for y in range(max(0, math.floor(min(ay, by) - reach)), min(self.height, math.ceil(max(ay, by) + reach) + 1)):
            for x in range(max(0, math.floor(min(ax, bx) - reach)), min(self.width, math.ceil(max(ax, bx) + reach) + 1)):
                along = 0 if square == 0 else min(1, max(0, ((x - ax) * dx + (y - ay) * dy) / square))
                cover = min(1.0, reach - math.hypot(x - ax - along * dx, y - ay - along * dy))
                if cover <= 0:
                    continue
                at = 3 * (y * self.width + x)
                for channel in range(3):
                    old = pixels[at + channel]
                    pixels[at + channel] = round(old + cover * (colour[channel] - old))


def _chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def ticks(low, high, about=6):
    """Round numbers that span [low, high]."""
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    first = math.floor(low / step + 1e-9)
    count = math.ceil(high / step - 1e-9) - first
    return [step * (first + i) for i in range(count + 1)]


class Panel:
    """Axes in a rectangle of a drawing; maps data to pixels."""

    def __init__(self, drawing, box, x_ticks, y_ticks):
        self.drawing, self.box = drawing, box
        self.x_range, self.y_range = (x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1])
        left, top, right, bottom = box
        for value in x_ticks:
            x, _ = self.at(value, y_ticks[0])
            drawing.line([(x, top), (x, bottom)], GRID)
            drawing.text(x, bottom + 18, f"{value:g}", anchor="middle")
        for value in y_ticks:
            _, y = self.at(x_ticks[0], value)
            drawing.line([(left, y), (right, y)], GRID)
            drawing.text(left - 8, y + 4, f"{value:g}", anchor="end")
        drawing.line([(left, top), (left, bottom), (right, bottom)], INK, 1.4)

    def at(self, x, y):
        left, top, right, bottom = self.box
        (x0, x1), (y0, y1) = self.x_range, self.y_range
        return left + (right - left) * (x - x0) / (x1 - x0), bottom - (bottom - top) * (y - y0) / (y1 - y0)

    def curve(self, points, colour, width):
        self.drawing.line([self.at(x, y) for x, y in points], colour, width)

    def titles(self, title, x_axis, below=""):
        left, top, right, bottom = self.box
        self.drawing.text(left, top - 26, title, size=14)
        self.drawing.text(left, top - 9, below, size=11, colour=FAINT)
        self.drawing.text((left + right) / 2, bottom + 38, x_axis, anchor="middle")


def stripe(index, count):
    """Colours from blue to orange for curves that lie on one another."""
    part = index / max(1, count - 1)
    return tuple(round(a + part * (b - a)) for a, b in zip((36, 92, 178), (248, 178, 70)))


def loss_picture(main, proof):
    """`main`: (train, validation), lists of (step, loss). `proof`: one such train list per run."""
    drawing = Drawing(1080, 460)
    train, validation = main
    losses = [loss for _, loss in train + validation]
    left = Panel(drawing, (60, 60, 640, 400), ticks(0, train[-1][0]), ticks(min(losses), max(losses)))
    left.titles("training loss, nats per byte", "step", "line: training, dots: held-out files")
    left.curve(train, BOLD, 3.0)
    for step, loss in validation:
        drawing.dot(*left.at(step, loss), 5, POINT)
    losses = [loss for run in proof for _, loss in run]
    right = Panel(drawing, (720, 60, 1050, 400), ticks(0, max(run[-1][0] for run in proof), 4), ticks(min(losses), max(losses)))
    right.titles(f"the proof: {len(proof)} runs", "step", "thinner and thinner, all on one another")
    for index, run in enumerate(proof):
        right.curve(run, stripe(index, len(proof)), 1.0 + 13.0 * (len(proof) - 1 - index) / max(1, len(proof) - 1))
    return drawing
