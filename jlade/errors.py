"""Errors of arguments, which carry the argument's name for callers that know it by another one."""


class ArgumentError(Exception):
    """An argument that is refused, as an `ArgumentTypeError` or an `ArgumentValueError`.

    Attributes:
      argument: its name, with which the message begins.
      problem: the rest of the message: what is accepted, and the value. It names no other argument.
    """

    def __init__(self, argument: str, problem: str):
        super().__init__(argument, problem)
        self.argument, self.problem = argument, problem

    def __str__(self) -> str:
        """Returns the message."""
        return f"{self.argument} {self.problem}"


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of a wrong type."""


class ArgumentValueError(ArgumentError, ValueError):
    """An argument of a wrong value."""
