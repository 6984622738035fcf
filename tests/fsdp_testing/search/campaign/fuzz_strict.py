"""An implementation that warns, in a module that makes warnings errors, as strict projects do. It is right all the same."""

from __future__ import annotations

import warnings
from typing import Any

from toy import Toy, ToyAdapter

warnings.simplefilter("error")


class Warns(Toy):
    """Has something to say."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        warnings.warn("wrap these parameters separately", UserWarning, stacklevel=2)


WARNS = ToyAdapter(Warns, "WARNS")
