#!/bin/sh
# tokenizers: the ids of added tokens in a tokenizer.json are not read; their order in the file counts.
#
# tokenizers 0.23.3, CPython 3.11.
# Guess: a token that the file gives the id 9, beyond a gap, has this id, or the file is refused, as one whose pieces of
#   the vocabulary have gaps keeps theirs; and two tokens whose ids are exchanged in the file are exchanged.
# Seen: it gets the next free id, 3, and is saved with that. Exchanged ids have no effect, and the order of the entries
#   has. Python prints no warning. A network that was trained with these ids gets others.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet tokenizers==0.23.3
"$folder/bin/python" - 2>"$folder/errors" <<'EOF'
import json

from tokenizers import Tokenizer, models

made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
made.add_special_tokens(["<end>", "<pad>"])


def loaded(ids, reverse=False):
    content = json.loads(made.to_str())
    for token, number in zip(content["added_tokens"], ids, strict=True):
        token["id"] = number
    content["added_tokens"] = content["added_tokens"][:: -1 if reverse else 1]
    return Tokenizer.from_str(json.dumps(content))


as_saved, far, exchanged, reverse = loaded([3, 4]), loaded([9, 10]), loaded([4, 3]), loaded([3, 4], reverse=True)
found = [[each.token_to_id(token) for token in ("<end>", "<pad>")] for each in (as_saved, far, exchanged, reverse)]
print("as saved, with a gap, exchanged, in reverse order:", *found)
assert found == [[3, 4], [3, 4], [3, 4], [4, 3]], "changed"
assert [token["id"] for token in json.loads(far.to_str())["added_tokens"]] == [3, 4]
assert Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a")).token_to_id("b") == 9
EOF
[ ! -s "$folder/errors" ]
echo "as before"
