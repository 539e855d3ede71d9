// Lets the search of the built site work when its pages are opened as files, where browsers refuse workers.
// The worker's script runs in a hidden frame, and messages are passed by calls.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this._waiting = [];
      this._frame = document.createElement("iframe");
      this._frame.hidden = true;
      document.body.appendChild(this._frame);
      const inside = this._frame.contentWindow;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = () => {
        const waiting = this._waiting;
        this._waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      };
      script.onerror = () => this.onerror && this.onerror(new Event("error"));
      inside.document.body.appendChild(script);
    }

    postMessage(data) {
      if (this._waiting) this._waiting.push(data);
      else {
        const inside = this._frame.contentWindow;
        inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      }
    }

    terminate() {
      this._frame.remove();
    }
  };
}
