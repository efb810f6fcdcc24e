"""A fault: a wrong function in the place of a right one."""

import inspect
import pkgutil
import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """A fault, and where to look for it."""

    text: str  # what is wrong
    target: str  # the dotted path of a function, a method, a class method or a property
    # From the right function, that of a property or a class method too, to the wrong one.
    wrong: Callable[[Any], Callable[..., Any]]
    tests: tuple[str, ...]  # files or functions of the suite, of which one at least must fail

    def place(self) -> tuple[Any, str, Any]:
        """Returns the module or the class that has the target, its name there, and what it is there."""
        path, _, name = self.target.rpartition(".")
        owner = pkgutil.resolve_name(path)
        return owner, name, inspect.getattr_static(owner, name)

    def function(self) -> Any:
        """Returns the right function."""
        *_, right = self.place()
        return right.fget if isinstance(right, property) else getattr(right, "__func__", right)

    def apply(self) -> None:
        """Puts the wrong function into this process, under every name that the right one has in the package."""
        owner, name, right = self.place()
        wrong = self.wrong(self.function())
        if isinstance(right, property | classmethod):
            wrong = type(right)(wrong)
        setattr(owner, name, wrong)
        for module in [module for path, module in sys.modules.items() if path.startswith("jlade.")]:
            for alias in [alias for alias, value in vars(module).items() if value is right]:
                setattr(module, alias, wrong)
