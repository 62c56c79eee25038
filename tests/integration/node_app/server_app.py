"""Asks clients, round by round, what a file says, and writes down what they answer and when."""

import itertools
import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

from tepal.server_app.grid import prompt

app = ServerApp()


@app.main()
def main(grid, context):
    grid = prompt(grid)
    folder, size = Path(context.run_config["folder"]), int(context.run_config["size"])
    numbers = itertools.count()
    number, waiting, asked, answers = next(numbers), {}, {}, {}
    while True:
        if (folder / f"{number}.todo").exists():
            waiting[number] = json.loads((folder / f"{number}.todo").read_text())
            if not waiting[number]:
                return
            number = next(numbers)
        nodes = {node.name: node.node_id for node in grid.get_nodes()} if waiting else {}
        for started in [key for key, todo in waiting.items() if set(todo) <= set(nodes)]:
            todo, messages = waiting.pop(started), []
            for name, do in todo.items():
                content = {"arrays": ArrayRecord([np.ones(size)]), "todo": ConfigRecord({"do": do})}
                messages.append(Message(RecordDict(content), nodes[name], "train", group_id=str(started)))
            answers[started] = {}
            for message_id, name in zip(grid.push_messages(messages), todo, strict=True):
                asked[message_id] = (started, name, len(todo))
        for reply in grid.pull_messages(list(asked)) if asked else []:
            key, name, expected = asked.pop(reply.metadata.reply_to_message_id)
            answer = answers[key][name] = {"at": time.time()}
            if reply.has_error():
                answer |= {"code": reply.error.code, "reason": reply.error.reason}
            else:
                answer |= dict(reply.content["said"])
                answer["shape"] = reply.content["arrays"].to_numpy_ndarrays()[0].shape
            if len(answers[key]) == expected:
                (folder / "part").write_text(json.dumps(answers.pop(key)))
                (folder / "part").rename(folder / f"{key}.json")
        time.sleep(0.02)
