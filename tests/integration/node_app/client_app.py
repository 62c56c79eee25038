"""Does what its message says, and tells of its process."""

import os
import time
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from helper import WHO

app = ClientApp()
count = 0


@app.train()
def train(msg, context):
    global count
    count += 1
    Path(context.run_config["folder"], "begun").touch()
    kind, _, number = msg.content["todo"]["do"].partition(":")
    if kind == "sleep":
        time.sleep(float(number))
    if kind == "raise":
        raise ZeroDivisionError("division by zero")
    arrays = ArrayRecord([2 * array for array in msg.content["arrays"].to_numpy_ndarrays()])
    said = ConfigRecord({"pid": os.getpid(), "count": count, "who": WHO})
    return Message(RecordDict({"said": said, "arrays": arrays}), reply_to=msg)
