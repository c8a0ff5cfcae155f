"""What a user sees when something is wrong: one message, no traceback."""


class KairosError(Exception):
    """A mistake or misfortune that the message explains in full; the command line prints it and exits with 1."""


class ConfigError(KairosError):
    """An experiment file or an option that cannot be used; names the field, the value and what is allowed."""


class DivergedError(KairosError):
    """A training whose next step is not finite; done again, it ends at the same step."""


class DamagedError(KairosError):
    """A file whose content does not match the checksum it carries, or that ends early."""
