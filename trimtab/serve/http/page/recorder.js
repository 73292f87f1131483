// The tap on the microphone, on the browser's audio thread: hands every piece of sound over as it is, and plays nothing.

class Tap extends AudioWorkletProcessor {
  process([input]) {
    if (input.length) this.port.postMessage(input[0].slice());
    return true;
  }
}

registerProcessor("tap", Tap);
