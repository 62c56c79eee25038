"""The search for the clients that cause merges which do not count.

A client can stay within every bound and still return values from which no client can train. Which one it was cannot be
seen from the values. So the clients of a merge that does not count become suspects, and the next attempts go without a
part of them: without those whose updates were by far the largest, if there are any; otherwise without the half that has
been in the most such merges. One hostile client is in one half; the other half can train, whatever it does.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import Any

from tepal.strategies.rounds.norms import largest

_CLEAR = 3
"""What an update that is by far the largest counts for, in merges that do not count."""
_LONGEST = 6  # 2^6 rounds is the longest time for which a client is set aside

_random = random.SystemRandom()  # a client must not know with whom it will be set aside


class Suspects:
    """How many merges that do not count each client was in, less those that count; and who is set aside for now."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._until: dict[str, int] = {}  # client → the first round in which it may take part again
        self._last: dict[str, float] = {}  # client → ratio of its update, in the last merge

    def merged(self, ratios: Mapping[str, float]) -> None:
        """Enter a merge of these clients. The one before it counts from now on: clients could train from it."""
        for client in self._last:
            if self._counts.get(client, 0) > 1:
                self._counts[client] -= 1
            else:
                self._counts.pop(client, None)
                self._until.pop(client, None)
        self._last = dict(ratios)

    def suspect_last(self, round: int) -> list[str]:
        """As `suspect`, of the clients of the last merge: no client can train from it."""
        ratios, self._last = self._last, {}
        return self.suspect(ratios, round)

    def suspect(self, ratios: Mapping[str, float], round: int) -> list[str]:
        """Enter that a merge of these clients does not count. Returns who is set aside now, sorted.

        Args:
            ratios: client → ratio of its update.
            round: in which the merge was found not to count. Those who are set aside may return in a later round: the
                more such merges they were in, the later.
        """
        aside = [] if self._counts else largest(ratios)
        for client in ratios:
            self._counts[client] = self._counts.get(client, 0) + (_CLEAR if client in aside else 1)
        if not aside:
            suspects = sorted(self._counts)
            _random.shuffle(suspects)
            suspects.sort(key=self._counts.__getitem__)
            aside = suspects[len(suspects) // 2 :]
        for client, count in self._counts.items():
            if client in aside:
                self._until[client] = round + 2 ** min(count, _LONGEST)
            else:
                self._until.pop(client, None)
        return sorted(aside)

    def set_aside(self, clients: Collection[str], round: int, needed: int) -> list[str]:
        """Those of these clients that do not take part in this round, sorted.

        Of suspects whose time is over, a half that is drawn at random may return: if its merge counts, it is cleared.

        Args:
            clients: who is available.
            round: the present one.
            needed: clients that must be left.
        """
        if not self._until:
            return []
        aside = [client for client in clients if self._until.get(client, 0) > round]
        back = [client for client in clients if client in self._until and client not in aside]
        aside += _random.sample(back, len(back) // 2)
        aside.sort(key=lambda client: (-self._counts.get(client, 0), client))
        return sorted(aside[: max(len(clients) - needed, 0)])

    def to_facts(self) -> dict[str, Any]:
        """What a checkpoint has of it."""
        return {"counts": dict(self._counts), "until": dict(self._until), "last": dict(self._last)}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Restore from a checkpoint's facts, which are empty in one of an earlier version."""
        self._counts, self._until = dict(facts.get("counts", {})), dict(facts.get("until", {}))
        self._last = dict(facts.get("last", {}))
