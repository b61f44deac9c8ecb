#!/bin/sh
# Plays episodes of a running server with curl and jq: what any language needs is four requests.
#
#   examples/play_episodes.sh [URL] [RUN] [EPISODES]        PALESTRA_KEY: where the server needs one
#
# A model call renews the lease. Who works for longer than the lease without one (a minute, unless the run says
# otherwise) posts {"client_id": …, "leases": [{"episode_id": …, "attempt": …}]} to /episodes/v1/heartbeat meanwhile.
# Every request may be sent again, so curl may retry: a server that is restarted is waited for.
set -eu
URL=${1:-http://127.0.0.1:8000} RUN=${2:-sums} LEFT=${3:-1000000}
ME="curl-$(hostname | tr -c 'A-Za-z0-9.\n' '-')-$$"

post() { # path, key; the body comes on stdin
    curl -sS --fail --retry 30 --retry-all-errors --retry-delay 1 --max-time 120 \
        -H "X-API-Key: $2" -H 'Content-Type: application/json' --data-binary @- "$1"
}

while [ "$LEFT" -gt 0 ]; do
    # A claim waits up to a minute for an episode. The same claim_id again would get the same one again.
    LEFT=$((LEFT - 1))
    LEASE=$(jq -n --arg me "$ME" --arg run "$RUN" --arg id "$ME-$LEFT" \
        '{client_id: $me, claim_id: $id, run: $run, wait_s: 60}' |
        post "$URL/episodes/v1/claim" "${PALESTRA_KEY:-}" | jq '.leases[0]')
    [ -n "$LEASE" ] || { echo "$URL did not answer the claim; is there a run '$RUN'?" >&2 && exit 1; }
    [ "$LEASE" != null ] || continue

    # The policy answers at base_url, as OpenAI would. The key is this attempt's, so its tokens are, too.
    SAID=$(echo "$LEASE" | jq '{model, messages: .task.prompt, max_tokens: 64}' |
        post "$(echo "$LEASE" | jq -r .base_url)/chat/completions" "$(echo "$LEASE" | jq -r .api_key)" |
        jq -r '.choices[0].message.content')

    # Whatever is worth a reward: here, the last number is the task's answer.
    NUMBER=$(printf %s "$SAID" | grep -oE '[-]?[0-9]+' | tail -n 1 || true)
    if [ "$NUMBER" = "$(echo "$LEASE" | jq -r .task.extras.answer)" ]; then REWARD=1; else REWARD=0; fi

    # The key of the attempt may end it. "accepted" is on disk; "lease_lost" came too late.
    echo "$LEASE" | jq --argjson reward "$REWARD" '{ends: [{episode_id, attempt, result: {reward: $reward}}]}' |
        post "$URL/episodes/v1/end" "$(echo "$LEASE" | jq -r .api_key)" |
        jq -r --argjson reward "$REWARD" '.ended[0] | "\(.episode_id): \($reward) (\(.status))"'
done
