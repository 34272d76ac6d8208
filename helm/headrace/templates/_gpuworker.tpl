{{/* The pod template of a pool's workers; takes what headrace.podBase takes, and config, port, image, serverName and tokens. */}}
{{- define "headrace.gpuworkerTemplate" -}}
{{- $pod := . -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{- $resources := mustDeepCopy (default (dict) $values.resources) -}}
{{- if gt (int $values.gpu.count) 0 -}}
{{- $limits := mustMerge (dict $values.gpu.resource (toString $values.gpu.count)) (default (dict) $resources.limits) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{ include "headrace.podMetadata" (merge (dict "config" (printf "%s%s\n%s" (ternary "" "leased" (eq $root.Values.discovery.type "static")) (include "headrace.gpuworkerConfig" (dict "root" $root "pool" $values)) (include "headrace.secretChecksum" $root))) $pod) }}
spec:
  {{- include "headrace.podBase" $pod | nindent 2 }}
  terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
  containers:
    - name: gpuworker
      {{- include "headrace.containerBase" $pod | nindent 6 }}
      args:
        - --config=/etc/headrace/config/gpuworker.toml
        {{- range $values.extraArgs }}
        - {{ . | quote }}
        {{- end }}
      ports:
        - name: grpc
          containerPort: 8702
          protocol: TCP
        {{- with include "headrace.adminPort" $root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
      {{- include "headrace.env" (dict "own" (printf "%s\n%s" (include "headrace.modelEnv" $root) (include "headrace.kernelEnv" $root)) "values" $values) | nindent 6 }}
      {{- include "headrace.probes" $pod | nindent 6 }}
      {{- with $resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- include "headrace.mounts" (dict "own" (printf "%s\n%s\n%s" (include "headrace.volumeMounts" $pod) (include "headrace.modelMount" $root) (include "headrace.workerVolumeMounts" $pod)) "values" $values) | nindent 6 }}
    {{- with $values.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- include "headrace.podVolumes" (dict "own" (printf "%s\n%s\n%s" (include "headrace.volumes" $pod) (include "headrace.modelVolume" (dict "root" $root "isWorker" true)) (include "headrace.workerVolumes" $pod)) "values" $values) | nindent 2 }}
{{- end }}
