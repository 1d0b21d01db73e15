"""Show the equations of docstrings as MathML, which browsers draw (a griffe extension)."""

import re
from textwrap import dedent
from typing import Any

import griffe
from latex2mathml.converter import convert

_BLOCK = re.compile(
    r"^(?P<indent> *)\.\. math::(?P<tex>.*(?:\n(?P=indent) +\S.*|\n *(?=\n(?P=indent) +\S))*)",
    re.MULTILINE,
)
_INLINE = re.compile(r":math:`(?P<tex>[^`]+)`")


class DocstringMath(griffe.Extension):
    """Translate the directive `.. math::` and the role `:math:` of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace the equations of one docstring."""
        if obj.docstring is not None:
            text = _BLOCK.sub(_display, obj.docstring.value)
            obj.docstring.value = _INLINE.sub(lambda found: convert(found["tex"]), text)


def _display(found: re.Match[str]) -> str:
    tex = " ".join(dedent(found["tex"]).split())
    return f"\n{found['indent']}{convert(tex, display='block')}\n"
