"""Points at which a kairos command kills itself with SIGKILL; see `commands.Commands.start`.

The process really dies when it passes the point for the N-th time; nothing is caught, flushed or cleaned up.
"""

import os
import signal


def die_at(count, function):
    """Wrap a function so that its `count`-th call kills the process before it does anything."""
    calls = [0]

    def wrapped(*arguments, **keywords):
        calls[0] += 1
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **keywords)

    return wrapped


def prepare(point: str, count: int) -> None:
    """Make this process die when it passes the point for the `count`-th time."""
    from kairos import files
    from kairos.training import checkpoint, loop
    from kairos_timesteps.samplers.adaptive import Adaptive

    if point == "step":  # before a step is computed
        loop._forward_backward = die_at(count, loop._forward_backward)
    elif point == "after_optimizer":  # the optimizer has stepped, the sampler has not measured the step yet
        Adaptive._measure_features = die_at(2 * count, Adaptive._measure_features)
    elif point in ("half_written", "not_synced", "not_renamed"):  # inside a checkpoint write
        write = checkpoint.write
        writes = [0]

        def write_and_die(path, content):
            writes[0] += 1
            if writes[0] == count:
                if point == "not_synced":
                    files.os.fsync = die_at(1, os.fsync)
                elif point == "not_renamed":
                    files.os.replace = die_at(1, os.replace)
                else:
                    checkpoint.atomic = half_written
            write(path, content)

        checkpoint.write = write_and_die
    elif point != "never":
        raise SystemExit(f"unknown point {point}")


def half_written(path):
    """Replace `files.atomic`: open the real temporary file and die in the middle of its second write."""
    from kairos import files

    real = files.atomic(path)

    class HalfWrittenFile:
        def __enter__(self):
            self.file = real.__enter__()
            self.writes = 0
            return self

        def write(self, data):
            self.writes += 1
            if self.writes == 2:
                self.file.write(data[: len(data) // 2])
                self.file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return self.file.write(data)

        def __exit__(self, *_):
            raise AssertionError("the process should have died in its second write")

    return HalfWrittenFile()
