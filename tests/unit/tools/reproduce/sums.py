"""A small experiment for tests."""

from collections.abc import Mapping

from tepal.tools.reproduce.experiment import Reproduction, Trial, table


class Sums:
    """Each trial adds one to what it needs. `needs`: trial → those that it needs."""

    name, title, paper, deviations = "sums", "Sums", "Nobody, Table 1", ()
    needs: Mapping[str, tuple[str, ...]] = {}

    def data(self, full):
        return ()

    def weights(self, full):
        return {}

    def scale(self, full):
        return "All."

    def trials(self, full):
        return [Trial(name, {}, needs) for name, needs in self.needs.items()]

    def compute(self, trial, inputs):
        return {"sum": 1 + sum(of["sum"] for of in inputs.needed.values())}

    def results(self, found):
        return Reproduction([table("Sums", ("cell", "sum"), [(name, of["sum"]) for name, of in found.items()])])
