// The requests of a snapshot, by instance, each in a row of its own for as long as it stays.

export const WAITING = 0, PREFILLING = 1, PLACED = 2, DECODING = 3, MOVING = 4;

export function requestAt(requests, i) {
  return {
    number: requests.number[i],
    name: requests.name[i],
    phase: requests.phase[i],
    instance: requests.instance[i],
    target: requests.target[i],
    prompt: requests.prompt[i],
    generated: requests.generated[i],
    context: requests.prompt[i] + requests.generated[i],
    low: requests.low[i],
    median: requests.median[i],
    high: requests.high[i],
  };
}

// Requests of every instance, of those that come to it, and of those that wait.
export function byInstance(snapshot) {
  const here = snapshot.instances.map(() => []);
  const coming = snapshot.instances.map(() => []);
  const waiting = [];
  for (let i = 0; i < snapshot.requests.number.length; i++) {
    const request = requestAt(snapshot.requests, i);
    if (request.instance < 0) waiting.push(request);
    else here[request.instance].push(request);
    if (request.target >= 0) coming[request.target].push(request);
  }
  return { here, coming, waiting };
}

// Gives every request the lowest row that is free when it comes.
export class Rows {
  #rows = new Map();

  place(requests) {
    const numbers = new Set(requests.map((one) => one.number));
    for (const number of this.#rows.keys()) if (!numbers.has(number)) this.#rows.delete(number);
    const taken = new Set(this.#rows.values());
    let next = 0;
    for (const { number } of requests) {
      if (this.#rows.has(number)) continue;
      while (taken.has(next)) next++;
      this.#rows.set(number, next);
      taken.add(next);
    }
    let count = 0;
    for (const row of this.#rows.values()) count = Math.max(count, row + 1);
    return count;
  }

  of(request) {
    return this.#rows.get(request.number);
  }
}
