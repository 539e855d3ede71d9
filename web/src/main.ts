import { mount } from "svelte";
import App from "./App.svelte";
import "./page.css";
import { live } from "./state/live.svelte";

live.start();
mount(App, { target: document.getElementById("page")! });
