"""Answer questions from a small invented encyclopedia, which two tools search and read."""

from prime_hpc.envs.wiki_search.taskset import WikiSearchHarness, WikiSearchTaskset

__all__ = ["WikiSearchHarness", "WikiSearchTaskset"]
