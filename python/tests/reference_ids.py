# SPDX-License-Identifier: Apache-2.0
"""Token ids of the template cases by transformers: printed as JSON, or written into cases.json with --write."""

import json
import sys
import tempfile

from .template_cases import cases, make_model, save_cases, template


def whole(messages):
    """transformers wants a call's arguments as an object where the template makes JSON of them."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls") or []:
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    return messages


def reference(case):
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, template(case))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        ids = tokenizer.apply_chat_template(
            whole(case["messages"]),
            tools=case.get("tools"),
            tokenize=True,
            return_dict=False,
            **case.get("variables", {}),
        )
    return list(map(int, ids))


def main():
    values = cases()
    results = [reference(case) for case in values]
    if "--write" in sys.argv:
        save_cases([{**case, "ids": ids} for case, ids in zip(values, results)])
    else:
        json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
