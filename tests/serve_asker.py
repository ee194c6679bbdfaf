#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Asks a model without a pause until a file is there or the server takes no more, and tells what came back.

serve_asker.py HOST:PORT MODEL STOP [THREADS]: x of [1, 4] are ones, and y tells what the model multiplies with. STOP.begun
is there once the first answer is. Prints a JSON object: how often each status and each factor came, in "first" and "last"
the factors of the first and last answers, and in "refusals" what else was said.
"""
import collections
import http.client
import json
import pathlib
import sys
import threading

BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}]})


def main():
    address, model, stop = sys.argv[1:4]
    threads = int(sys.argv[4]) if len(sys.argv) > 4 else 4
    statuses, factors, order, refusals = collections.Counter(), collections.Counter(), [], set()
    lock, over = threading.Lock(), threading.Event()

    def ask():
        connection, fresh = http.client.HTTPConnection(address, timeout=60), True
        while not over.is_set() and not pathlib.Path(stop).exists():
            try:
                connection.request("POST", f"/v2/models/{model}/infer", BODY)
                answer = connection.getresponse()
                text = answer.read()
            except ConnectionRefusedError:
                return over.set()
            except (http.client.RemoteDisconnected, ConnectionError, BrokenPipeError):
                connection.close()
                if fresh:  # it was not accepted: the server is about to be gone
                    return over.set()
                fresh = True
                continue
            fresh = answer.will_close or answer.getheader("connection") == "close"
            if fresh:
                connection.close()
            with lock:
                statuses[answer.status] += 1
                if answer.status == 200:
                    factor = json.loads(text)["outputs"][0]["data"][0]
                    if not factors:
                        pathlib.Path(f"{stop}.begun").touch()
                    factors[factor] += 1
                    order.append(factor)
                else:
                    refusals.add(text.decode())

    askers = [threading.Thread(target=ask) for _ in range(threads)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    print(json.dumps({"statuses": statuses, "factors": factors, "first": order[0] if order else None,
                      "last": order[-1] if order else None, "refusals": sorted(refusals)}))


if __name__ == "__main__":
    main()
