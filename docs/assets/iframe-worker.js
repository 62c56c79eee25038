// A page from disk may not start a worker. The search, which is one, then runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const load = (source) =>
        new Promise((done, failed) => {
          const script = this.scope.document.createElement("script");
          Object.assign(script, { src: source, onload: done, onerror: failed });
          this.scope.document.body.append(script);
        });
      this.scope.importScripts = (...sources) => Promise.all(sources.map(load));
      this.ready = load(String(url));
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
