{{/* What every pod has. */}}

{{/* The metadata of a pod template; takes a dict of root, component, values, perhaps pool, and config. */}}
{{- define "headrace.podMetadata" -}}
{{- $annotations := mustMergeOverwrite (dict) (default (dict) .root.Values.commonAnnotations) (default (dict) .values.podAnnotations) -}}
{{- with .config -}}
{{- $_ := set $annotations "checksum/config" (sha256sum .) -}}
{{- end -}}
metadata:
  labels:
    {{- toYaml (mustMergeOverwrite (dict) (default (dict) .root.Values.commonLabels) (default (dict) .values.podLabels) (include "headrace.labels" . | fromYaml)) | nindent 4 }}
  {{- with $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/*
Account, security and placement; takes a dict of root, component, values and perhaps pool, gpu.
Without enableServiceLinks: false a Service named headrace-router would put HEADRACE_ROUTER_PORT and
such into the environment, which the services read as settings and refuse.
*/}}
{{- define "headrace.podBase" -}}
{{- $defaults := .root.Values.podDefaults -}}
{{- $tolerations := default (list) (default $defaults.tolerations .values.tolerations) -}}
{{- with .gpu -}}
{{- if and (gt (int .count) 0) .tolerateTaint -}}
{{- $tolerations = append $tolerations (dict "key" .resource "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
{{- end -}}
serviceAccountName: {{ include "headrace.podAccount" . }}
automountServiceAccountToken: {{ include "headrace.callsKubernetes" . | eq "true" }}
enableServiceLinks: false
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with default $defaults.nodeSelector .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with default $defaults.affinity .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $selector := dict "labelSelector" (dict "matchLabels" (include "headrace.selector" . | fromYaml)) }}
{{- $constraints := list }}
{{- range default $defaults.topologySpreadConstraints .values.topologySpreadConstraints }}
{{- $constraints = append $constraints (ternary . (mustMerge (mustDeepCopy .) $selector) (hasKey . "labelSelector")) }}
{{- end }}
{{- with $constraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with default $defaults.priorityClassName .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with default $defaults.runtimeClassName .values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .values.initContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
Two lists of objects as one, as YAML under `list`; takes a dict of own, extra and key. Of two objects
with the same key the extra one stays: server-side apply refuses a list with both.
*/}}
{{- define "headrace.mergedList" -}}
{{- $key := .key -}}
{{- $extra := default (list) .extra -}}
{{- $taken := dict -}}
{{- range $extra -}}
{{- $_ := set $taken (get . $key | toString) true -}}
{{- end -}}
{{- $all := list -}}
{{- range .own -}}
{{- if not (hasKey $taken (get . $key | toString)) -}}
{{- $all = append $all . -}}
{{- end -}}
{{- end -}}
{{- dict "list" (concat $all $extra) | toYaml -}}
{{- end }}

{{/*
Environment, volumes' mounts and volumes of a container of ours, each with what the user adds; take a
dict of own (YAML of a list) and values.
*/}}
{{- define "headrace.env" -}}
{{- with (include "headrace.mergedList" (dict "own" (fromYamlArray .own) "extra" .values.extraEnv "key" "name") | fromYaml).list -}}
env:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- with .values.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "headrace.mounts" -}}
volumeMounts:
  {{- toYaml (include "headrace.mergedList" (dict "own" (fromYamlArray .own) "extra" .values.extraVolumeMounts "key" "mountPath") | fromYaml).list | nindent 2 }}
{{- end }}

{{- define "headrace.podVolumes" -}}
volumes:
  {{- toYaml (include "headrace.mergedList" (dict "own" (fromYamlArray .own) "extra" .values.extraVolumes "key" "name") | fromYaml).list | nindent 2 }}
{{- end }}

{{/* image and security of a container; takes a dict of root and image. */}}
{{- define "headrace.containerBase" -}}
image: {{ include "headrace.image" . | quote }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
{{- with .root.Values.containerSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
Probes and the wait before SIGTERM; takes a dict of root, values, port and serverName, a name in the
certificate of the service.
*/}}
{{- define "headrace.probes" -}}
{{- $probes := .root.Values.probes -}}
{{- $period := int $probes.periodSeconds -}}
{{- $type := $probes.type -}}
{{- if eq $type "auto" -}}
{{- $hasGrpc := semverCompare ">=1.24.0-0" .root.Capabilities.KubeVersion.Version -}}
{{- $type = ternary "exec" "grpc" (or .root.Values.tls.enabled (not $hasGrpc)) -}}
{{- end -}}
{{- $parts := dict "root" .root "port" .port "serverName" .serverName "type" $type "path" "/readyz" -}}
{{- $check := include "headrace.check" $parts -}}
startupProbe:
  {{- $check | nindent 2 }}
  failureThreshold: {{ div (add (int $probes.startupBudgetSeconds) (sub $period 1)) $period }}
readinessProbe:
  {{- $check | nindent 2 }}
  failureThreshold: 3
livenessProbe:
  {{- include "headrace.check" (mustMerge (dict "path" "/healthz") $parts) | nindent 2 }}
  failureThreshold: {{ $probes.livenessFailures }}
{{- with int .values.preStopSeconds }}
lifecycle:
  preStop:
    exec:
      command: ["sleep", {{ . | quote }}]
{{- end }}
{{- end }}

{{- define "headrace.check" -}}
{{- if eq .type "grpc" -}}
grpc:
  port: {{ .port }}
{{- else if eq .type "http" -}}
httpGet:
  path: {{ .path }}
  port: admin
  scheme: {{ ternary "HTTPS" "HTTP" .root.Values.tls.enabled }}
{{- else if eq .type "tcp" -}}
tcpSocket:
  port: grpc
{{- else -}}
exec:
  command:
    - python
    - /opt/headrace/health.py
    - 127.0.0.1:{{ .port }}
    {{- if .root.Values.tls.enabled }}
    - --tls-dir=/etc/headrace/tls
    - --server-name={{ .serverName }}
    {{- end }}
{{- end }}
periodSeconds: {{ .root.Values.probes.periodSeconds }}
timeoutSeconds: {{ .root.Values.probes.timeoutSeconds }}
{{- end }}

{{/* What a `headrace` command shows the routers, as flags; takes the root. */}}
{{- define "headrace.clientFlags" -}}
{{- if .Values.auth.enabled }}
- --auth-token-file=/etc/headrace/tokens/router-token
{{- end }}
{{- if .Values.tls.enabled }}
- --tls-ca-file=/etc/headrace/tls/ca.crt
{{- if .Values.tls.requireClientCertificates }}
- --tls-cert-file=/etc/headrace/tls/tls.crt
- --tls-key-file=/etc/headrace/tls/tls.key
{{- end }}
{{- end }}
{{- end }}

{{/* The port of metrics and probes, beside a container's other ports; takes the root. */}}
{{- define "headrace.adminPort" -}}
{{- if .Values.monitoring.enabled }}
- name: admin
  containerPort: 8710
  protocol: TCP
{{- end }}
{{- end }}

{{- define "headrace.podNameEnv" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      apiVersion: v1
      fieldPath: metadata.name
{{- end }}

{{/* The Secret that holds the tokens, and the one with a service's certificate. */}}
{{- define "headrace.tokenSecret" -}}
{{- default (printf "%s-tokens" (include "headrace.fullname" .)) .Values.auth.existingSecret -}}
{{- end }}

{{- define "headrace.tlsSecret" -}}
{{- $name := printf "%s-%s-tls" (include "headrace.fullname" .root) .service -}}
{{- ternary $name (get .root.Values.tls.existingSecrets .service) .root.Values.tls.certManager.enabled -}}
{{- end }}

{{/*
Volumes with settings, tokens, certificate and room for temporary files; takes a dict of root, values,
config (name of the ConfigMap), service and tokens (keys that this pod may see).
*/}}
{{- define "headrace.volumes" -}}
- name: config
  configMap:
    name: {{ .config }}
- name: tmp
  emptyDir: {}
{{- if .root.Values.auth.enabled }}
- name: tokens
  secret:
    secretName: {{ include "headrace.tokenSecret" .root }}
    defaultMode: 0440
    items:
      {{- range .tokens }}
      - key: {{ . }}
        path: {{ . }}
      {{- end }}
      {{- if and .root.Values.monitoring.enabled (not (has .component (list "test" "pool-controller"))) }}
      - key: metrics-token
        path: metrics-token
      {{- end }}
{{- end }}
{{- if and (has "scheduler-token" .tokens) (eq .service "router") .root.Values.auth.enabled .root.Values.auth.apiKeys.existingSecret }}
- name: keys
  secret:
    secretName: {{ .root.Values.auth.apiKeys.existingSecret }}
    defaultMode: 0440
    items:
      - key: {{ .root.Values.auth.apiKeys.key }}
        path: keys.toml
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "headrace.tlsSecret" (dict "root" .root "service" .service) }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{- define "headrace.volumeMounts" -}}
- name: config
  mountPath: /etc/headrace/config
  readOnly: true
- name: tmp
  mountPath: /tmp
{{- if .root.Values.auth.enabled }}
- name: tokens
  mountPath: /etc/headrace/tokens
  readOnly: true
{{- end }}
{{- if and (has "scheduler-token" .tokens) (eq .service "router") .root.Values.auth.enabled .root.Values.auth.apiKeys.existingSecret }}
- name: keys
  mountPath: /etc/headrace/keys
  readOnly: true
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  mountPath: /etc/headrace/tls
  readOnly: true
{{- end }}
{{- end }}
