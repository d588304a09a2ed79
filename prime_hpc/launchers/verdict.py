"""How an attempt ended, for people and for the shell."""

from prime_hpc.cluster.files import read_json
from prime_hpc.cluster.lease import EXIT_FENCED
from prime_hpc.cluster.paths import RunPaths
from prime_hpc.launchers.supervisor import Ending
from prime_hpc.launchers.view import View
from prime_hpc.observe.evaluation import describe_evaluation
from prime_hpc.observe.guard import NAME as GUARD
from prime_hpc.observe.resumption import how_to_resume

EXIT_INTERRUPTED = 130


def verdict(ending: Ending, paths: RunPaths, view: View) -> int:
    """Say how the run ended; returns the exit code for it."""
    match ending.kind:
        case "complete":
            if paths.bench_table.exists():
                view.say(paths.bench_table.read_text())
            for line in describe_evaluation(read_json(paths.summary) or {}):
                view.say(f"evaluated {line}")
            view.say(f"complete; everything lies in {paths.root}")
            return 0
        case "drained":
            view.say(f"drained: saved and left, since {ending.words}; {how_to_resume(paths)}")
            return 1 if ending.by == GUARD else 0
        case "stopped":
            view.say(f"stopped: {ending.words}; {how_to_resume(paths)}")
            return EXIT_INTERRUPTED
        case "fenced":
            view.say("the main job is gone; its next start is waited for")
            return EXIT_FENCED
    failure = ending.failure
    how = {"hang": "it hung", "asked": failure.reason}.get(failure.kind, f"exit code {failure.exit_code}")
    view.say(f"{failure.process} failed first ({how}); {ending.words}")
    return 1
